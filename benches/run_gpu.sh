#!/usr/bin/env bash
# What benches/pack_gpu.sh packs, on a GPU host. Results go to $OUT (results/ beside this file): gpu.md as printed, samples.txt with raw
# samples, a log of each test. BACKENDS: of "python", "bridges" and "fits"; a framework that lies apart is found by PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")"
export OUT=${OUT:-$PWD/results} SOK_COMMIT=$(cat commit) SOK_SAMPLES SOK_NVRTC
mkdir -p "$OUT"
SOK_SAMPLES=$OUT/samples.txt
SOK_NVRTC=${SOK_NVRTC:-$(ls /usr/local/cuda*/targets/*/lib/libnvrtc.so.1[23] 2>/dev/null | tail -1)}
failed=0

# Runs all tests but those of `soak` and `faults`. Each test has its own process. One process for each core runs at a time, because tests
# spend most of their time in the compiler. The test of a full GPU runs alone, because it needs all memory.
tests() {
  mkdir -p "$OUT/tests"
  ./conformance --list --ignored | sed -n 's/: test$//p' | grep -vE '^(faults::|soak_|memory_that)' | xargs -P "$(nproc)" -I NAME \
    sh -c './conformance --ignored --exact NAME > "$OUT/tests/NAME.log" 2>&1' || failed=1
  ./conformance --ignored memory_that > "$OUT/tests/memory_that.log" 2>&1 || failed=1
  cat "$OUT"/tests/*.log | grep -E '^test .*FAILED|^test result' | sed 's/;.*//' | sort | uniq -c
}

# In eight parts at a time: most of what it waits for is the compiler.
soak() {
  for part in 0 1 2 3 4 5 6 7; do SOK_TEST_PART=$part/8 ./conformance --ignored --nocapture soak_ > "$OUT/soak$part.log" 2>&1 & done
  for job in $(jobs -p); do wait "$job" || failed=1; done
  grep -hE "ids:|^test result" "$OUT"/soak?.log
}

# Each call of the driver fails once.
faults() {
  mkdir -p faulty && cp libcuda.so faulty/
  LD_LIBRARY_PATH=$PWD/faulty${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ./conformance --ignored --test-threads=1 --nocapture a_driver_that_fails > "$OUT/faults.log" 2>&1 || failed=1
  grep -hE "calls are errors|in silence|^test result" "$OUT/faults.log"
}

sanitizer() {
  for tool in memcheck initcheck synccheck racecheck; do
    SOK_TEST_CASES=10 compute-sanitizer --tool "$tool" --error-exitcode 9 ./conformance --ignored --test-threads=1 --skip ranks:: any_list a_key_that a_subset a_batch a_commit_ rows_made an_id_of any_bags \
      accumulated the_norm calls_on > "$OUT/$tool.log" 2>&1 &
  done
  SOK_TEST_CASES=2 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 ./conformance --ignored --nocapture --exact \
    ranks::ranks_have_the_bits_of_ranks_on_the_host > "$OUT/memcheck_ranks.log" 2>&1 &
  for job in $(jobs -p); do wait "$job" || failed=1; done
  grep -hE 'ERROR SUMMARY' "$OUT/memcheck_ranks.log"
  for tool in memcheck initcheck synccheck racecheck; do echo "$tool: $(grep -hE 'ERROR SUMMARY|RACECHECK SUMMARY' "$OUT/$tool.log" | tail -1)"; done
}

site() {
  [ -d site ] || python3 -m pip install -q --no-index --no-deps --no-compile --target site ./*.whl
  export PYTHONPATH=$PWD/site${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false TF_FORCE_GPU_ALLOW_GROWTH=true
}

python() {
  site
  for backend in ${BACKENDS:-torch jax}; do
    for file in ${FILES:-test_gpu test_torch test_layers test_nesting test_bad_input test_insertion test_masks test_out_of_vocabulary test_pitfalls test_pitfalls_of_ids test_equivalence test_equivalence_of_many test_tickets test_formulas test_forks test_failed_steps test_persistence test_damaged_dumps test_dump_checkpoint test_weights test_other_names test_callbacks test_frozen_tables test_two_optimizers test_tables test_in_flight test_statistics test_profile}; do
      KERAS_BACKEND=$backend python3 -m pytest -q -p no:cacheprovider --rootdir . -o addopts= -o pythonpath=tests tests/*/"$file.py" > "$OUT/$backend.$file.log" 2>&1 &
    done
  done
  for job in $(jobs -p); do wait "$job" || failed=1; done
  for log in "$OUT"/*.test_*.log; do echo "$(basename "$log" .log): $(tail -1 "$log")"; done
}

# Parts of gpu.md: `print NAME` keeps what it is given as one, or as more of it, and shows it.
print() {
  tee -a "$OUT/$1.part.md"
  cat "$OUT"/{benches,bridges,fits}.part.md > "$OUT/gpu.md" 2>/dev/null
}

benches() {
  rm -f "$OUT"/*.part.md
  {
    echo "# On a GPU"
    for bench in find step lookup growth policies; do ./$bench; done
  } | print benches
}

bridges() {
  site
  native() { grep -m1 "26 x 65,536, dim 64, Zipf | $1" "$OUT/benches.part.md" | cut -d'|' -f4; }
  [ -e "$OUT/bridges.part.md" ] || print bridges << 'END'

## The first step under a framework, dense layers left out

| framework | gradients | ms a step in a row | alone, waited for | µs above native |
|---|---|---|---|---|
END
  for backend in ${BACKENDS:-torch jax}; do KERAS_BACKEND=$backend python3 gpu_bridge.py $(native held) $(native merged) 2>/dev/null; done | print bridges
}

fits() {
  site
  [ -e "$OUT/fits.part.md" ] || print fits << 'END'

## DeepFM of the example, tower of 10 x 1024, batches of 16,384, `model.fit`

| framework | ms a step with tables | with the embedding output fed as an input | above |
|---|---|---|---|
END
  for backend in ${BACKENDS:-torch jax}; do KERAS_BACKEND=$backend JAX_ENABLE_X64=1 python3 gpu_fit.py examples 2>/dev/null; done | print fits
}

general() {
  site
  for batch in 16384 65536; do
    BATCH=$batch python3 benches/general.py --backends ${BACKENDS:-jax torch} --rounds 9 --runs 40 --output "$OUT/general_$batch.md" || failed=1
  done
}

# Needs a GPU for each rank.
ranks() {
  site
  ./ranks | tee "$OUT/ranks.md"
  for backend in ${BACKENDS:-jax torch}; do KERAS_BACKEND=$backend JAX_ENABLE_X64=1 python3 gpu_ranks.py examples 2>/dev/null; done | tee -a "$OUT/ranks.md"
}

for part in "${@:-tests}"; do "$part"; done
exit $failed
