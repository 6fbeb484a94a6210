/* The yardstick: one training step over plain arrays, no hashing, no framework. Rows are gathered (and summed over bags) and
 * updated, with prefetch and huge pages; ids are row numbers.
 *
 *   gcc -O3 -march=native -ffast-math -pthread limit.c -o limit -lm
 *   ./limit DATA_DIR THREADS RUNS     one line a measurement: case dim mode median_ms
 *
 * Modes: fwd (gather), sgd (fwd, then row -= lr * gradient for each id; rows are split between the threads, so it is exact),
 * adam (fwd, then gradients of equal ids are summed through a slot map, then one lazy Adam step a distinct row). */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { BATCH = 16384, FEATURES = 26, BATCHES = 4, AHEAD = 24, MAX_THREADS = 64, MAX_BAG = 8, MAX_DIM = 64 };
enum { FWD, SGD, ADAM };

static long vocabulary, bag;
static int threads, dim, mode, quit;
static float *table, *momentum, *velocity, *output, *gradient, *sums[MAX_THREADS];
static int32_t *slot, *mine[MAX_THREADS];
static int64_t *ids, *distinct[MAX_THREADS];
static pthread_barrier_t start, middle, end;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *huge(size_t bytes) {
  void *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) { perror("mmap"); exit(1); }
  madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

static inline void prefetch(const float *row, int d) {
  for (int k = 0; k < d; k += 16) __builtin_prefetch(row + k, 1, 0);
}

/* Ids whose rows this thread owns: 16 neighbours an owner, chosen without a branch. */
static long own(int t) {
  long count = 0, n = (long)BATCH * FEATURES * bag;
  for (long i = 0; i < n; i++) {
    mine[t][count] = (int32_t)i;
    count += threads == 1 || (ids[i] >> 4) % threads == t;
  }
  return count;
}

#define MODES(D)                                                                                                       \
  static void forward_##D(long first, long last) {                                                                     \
    long stop = last * bag;                                                                                            \
    for (long i = first; i < last; i++) {                                                                              \
      float sum[D] = {0};                                                                                              \
      for (long j = i * bag; j < (i + 1) * bag; j++) {                                                                 \
        if (j + AHEAD < stop) prefetch(table + ids[j + AHEAD] * D, D);                                                 \
        const float *row = table + ids[j] * D;                                                                         \
        for (int k = 0; k < D; k++) sum[k] += row[k];                                                                  \
      }                                                                                                                \
      memcpy(output + i * D, sum, sizeof sum);                                                                         \
    }                                                                                                                  \
  }                                                                                                                    \
  static void sgd_##D(int t) {                                                                                         \
    long n = own(t);                                                                                                   \
    int32_t *at = mine[t];                                                                                             \
    for (long i = 0; i < n; i++) {                                                                                     \
      if (i + AHEAD < n) {                                                                                             \
        prefetch(table + ids[at[i + AHEAD]] * D, D);                                                                   \
        prefetch(gradient + at[i + AHEAD] / bag * D, D);                                                               \
      }                                                                                                                \
      float *row = table + ids[at[i]] * D;                                                                             \
      const float *g = gradient + at[i] / bag * D;                                                                     \
      for (int k = 0; k < D; k++) row[k] -= 1e-2f * g[k];                                                              \
    }                                                                                                                  \
  }                                                                                                                    \
  static void adam_##D(int t) {                                                                                        \
    long n = own(t), count = 0;                                                                                        \
    int32_t *at = mine[t];                                                                                             \
    for (long i = 0; i < n; i++) {                                                                                     \
      if (i + 2 * AHEAD < n) __builtin_prefetch(slot + ids[at[i + 2 * AHEAD]], 1, 0);                                  \
      if (i + AHEAD < n) {                                                                                             \
        int32_t s = slot[ids[at[i + AHEAD]]];                                                                          \
        if (s >= 0) prefetch(sums[t] + (long)s * D, D);                                                                \
        prefetch(gradient + at[i + AHEAD] / bag * D, D);                                                               \
      }                                                                                                                \
      int64_t r = ids[at[i]];                                                                                          \
      const float *g = gradient + at[i] / bag * D;                                                                     \
      if (slot[r] < 0) {                                                                                               \
        slot[r] = (int32_t)count;                                                                                      \
        distinct[t][count++] = r;                                                                                      \
        memcpy(sums[t] + (long)slot[r] * D, g, D * 4);                                                                 \
      } else {                                                                                                         \
        float *s = sums[t] + (long)slot[r] * D;                                                                        \
        for (int k = 0; k < D; k++) s[k] += g[k];                                                                      \
      }                                                                                                                \
    }                                                                                                                  \
    for (long i = 0; i < count; i++) {                                                                                 \
      if (i + 8 < count) {                                                                                             \
        int64_t q = distinct[t][i + 8];                                                                                \
        prefetch(table + q * D, D), prefetch(momentum + q * D, D), prefetch(velocity + q * D, D);                      \
      }                                                                                                                \
      int64_t r = distinct[t][i];                                                                                      \
      slot[r] = -1;                                                                                                    \
      const float *g = sums[t] + i * D;                                                                                \
      float *w = table + r * D, *m = momentum + r * D, *v = velocity + r * D;                                          \
      for (int k = 0; k < D; k++) {                                                                                    \
        m[k] += .1f * (g[k] - m[k]);                                                                                   \
        v[k] += .001f * (g[k] * g[k] - v[k]);                                                                          \
        w[k] -= 1e-3f * m[k] / (sqrtf(v[k]) + 1e-7f);                                                                  \
      }                                                                                                                \
    }                                                                                                                  \
  }
MODES(16)
MODES(64)

static void step(int t) {
  long bags = (long)BATCH * FEATURES, first = bags * t / threads, last = bags * (t + 1) / threads;
  if (dim == 16) forward_16(first, last); else forward_64(first, last);
  if (mode == FWD) return;
  pthread_barrier_wait(&middle);
  if (mode == SGD) { if (dim == 16) sgd_16(t); else sgd_64(t); }
  else { if (dim == 16) adam_16(t); else adam_64(t); }
}

static void *worker(void *number) {
  for (;;) {
    pthread_barrier_wait(&start);
    if (quit) return 0;
    step((int)(long)number);
    pthread_barrier_wait(&end);
  }
}

static int ascending(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return x < y ? -1 : x > y;
}

static int64_t *load(const char *dir, const char *name, int number, long count) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s_%d.i64", dir, name, number);
  FILE *file = fopen(path, "rb");
  int64_t *values = malloc(count * 8);
  if (!file || (long)fread(values, 8, count, file) != count) { perror(path); exit(1); }
  fclose(file);
  return values;
}

int main(int argc, char **argv) {
  if (argc != 5) { fprintf(stderr, "usage: limit DATA_DIR THREADS RUNS VOCABULARY\n"); return 2; }
  threads = atoi(argv[2]);
  int runs = atoi(argv[3]);
  vocabulary = atol(argv[4]);
  pthread_barrier_init(&start, 0, threads + 1), pthread_barrier_init(&middle, 0, threads), pthread_barrier_init(&end, 0, threads + 1);
  size_t rows = vocabulary * MAX_DIM, samples = (size_t)BATCH * FEATURES * MAX_DIM, places = (size_t)BATCH * FEATURES * MAX_BAG;
  table = huge(rows * 4), momentum = huge(rows * 4), velocity = huge(rows * 4), output = huge(samples * 4), gradient = huge(samples * 4);
  slot = huge(vocabulary * 4);
  for (int t = 0; t < threads; t++) {
    sums[t] = huge((places / 4) * MAX_DIM * 4), mine[t] = huge((places + 1) * 4), distinct[t] = huge(vocabulary * 8);
    memset(sums[t], 0, (places / 4) * MAX_DIM * 4);
  }
  for (long i = 0; i < vocabulary; i++) slot[i] = -1;
  for (size_t i = 0; i < rows; i++) table[i] = 1e-3f * (i % 97), momentum[i] = 0, velocity[i] = 1e-6f;
  for (size_t i = 0; i < samples; i++) gradient[i] = 1e-4f * ((int)(i % 89) - 44), output[i] = 0;
  pthread_t workers[MAX_THREADS];
  for (long t = 0; t < threads; t++) pthread_create(&workers[t], 0, worker, (void *)t);
  const char *modes[] = {"fwd", "sgd", "adam"};
  char name[16], wanted[8];
  double *times = malloc(runs * sizeof *times);
  while (scanf("%15s %d %7s", name, &dim, wanted) == 3) {
    bag = strcmp(name, "onehot") ? MAX_BAG : 1;
    for (mode = FWD; strcmp(modes[mode], wanted); mode++) if (mode == ADAM) return 2;
    int64_t *batches[BATCHES];
    for (int b = 0; b < BATCHES; b++) batches[b] = load(argv[1], name, b, BATCH * FEATURES * bag);
    for (int r = -BATCHES; r < runs; r++) {
      ids = batches[(r + BATCHES) % BATCHES];
      double begin = now();
      pthread_barrier_wait(&start), pthread_barrier_wait(&end);
      if (r >= 0) times[r] = now() - begin;
    }
    qsort(times, runs, sizeof *times, ascending);
    printf("%.3f\n", times[runs / 2] * 1e3), fflush(stdout);
    for (int b = 0; b < BATCHES; b++) free(batches[b]);
  }
  quit = 1;
  pthread_barrier_wait(&start);
  for (int t = 0; t < threads; t++) pthread_join(workers[t], 0);
  return 0;
}
