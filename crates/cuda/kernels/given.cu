// Scores that come with the ids of lookups, for tables whose rows have such scores.
//
// A lookup keeps its keys with their scores. The commit that takes its gradients resets the scores of the rows, then raises them to the highest
// that came. It finds the rows by their keys, because it may have inserted some itself.
#include "step.cuh"

// Returns the score of an id plus 1, or 0 if it has none. `begin`: where the feature's ids begin in memory of another rank.
__device__ __forceinline__ u64 sent_score(const Feature& f, u32 begin, u32 i) {
  if (!f.scores) return 0;
  switch (f.score_type) {
    case WIDE_SCORES: return (u64)max(((const long long*)f.scores)[i], 0ll) + 1;
    case NARROW_SCORES: return (u64)max(((const int*)f.scores)[i], 0) + 1;
    default: return load_once((const u64*)f.scores + begin + i);
  }
}

// Keeps the key and the score of each id. Ids that are not active have no score. `begins`: by feature, or null. Has the grid of `find_records`.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) keep_scores(
    const __grid_constant__ Call call, const u32* begins, KeyScore* to) {
  begin();
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x;
  if (i >= feature.num_ids) return;
  const u64 key = key_at(feature, i);
  const bool has_score = !feature.is_silent && is_active(feature, call.tables[feature.table], key, i);
  to[feature.first_id + i] = {key, has_score ? sent_score(feature, begins ? begins[number] : 0, i) : 0};
}

// Calls `body` with the table, the record and the score of the thread's id, if it has a score and a row. `table`: which table, or ~0 for all.
template <class Body>
__device__ __forceinline__ void with_given(
    const Call& call, const Table* tables, u32 table, const KeyScore* given, const Resolved* resolved, u32 row, const Body& body) {
  if (row < RING && (!resolved->is_due || resolved->weights[row] == 0)) return;
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const Table& t = tables[feature.table];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x;
  if (i >= feature.num_ids || t.scoring != GIVEN || !t.scores || (table != ~0u && table != feature.table)) return;
  const KeyScore one = given[feature.first_id + i];
  const u32 record = one.score ? find_alone(t.index, one.key) : NO_RECORD;
  if (record != NO_RECORD) body(t, record, one.score - 1);
}

// As a commit takes a push of a lookup: sets the scores of the rows for which scores came to 0. `row`: of the ticket that names the push; RING:
// it is known to be named. Has the grid of `find_records`.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) reset_scores(
    const __grid_constant__ Call call, const Table* tables, u32 table, const KeyScore* given, const Resolved* resolved, u32 row) {
  begin();
  with_given(call, tables, table, given, resolved, row, [](const Table& t, u32 record, u64) {
    t.scores[record] = 0;
    lower_floor(t.floor_scores, record);
  });
}

// Then raises them to the highest that came.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) raise_scores(
    const __grid_constant__ Call call, const Table* tables, u32 table, const KeyScore* given, const Resolved* resolved, u32 row) {
  begin();
  with_given(call, tables, table, given, resolved, row, [](const Table& t, u32 record, u64 score) {
    atomicMax(t.scores + record, score);
    note_change(t, record);
  });
}
