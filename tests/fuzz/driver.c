/* driver.c -- a main() for fuzz targets where the compiler has no libFuzzer (gcc).
 *
 *   driver FILE...                         runs each file once
 *   driver -runs=N [-seed=S] [-max_len=L]  runs N random inputs; input i depends on S + i alone,
 *                                          so `-runs=1 -seed=<S + i>` repeats just that one */
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kit/rng.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t running; /* the seed that runs now */
static bool done = true;

/* A check that fails ends the program by exit() somewhere in the target, an assert by abort(). */
static void
tell_which(void)
{
    if (!done) fprintf(stderr, "failed: repeat with -runs=1 -seed=%" PRIu64 "\n", running);
}

static void
on_abort(int signal_number)
{
    (void)signal_number;
    tell_which();
}

static int
run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data;
    long size;

    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0) {
        perror(path);
        return 1;
    }
    rewind(file);
    data = malloc((size_t)size + (size == 0));
    if (data == NULL || fread(data, 1, (size_t)size, file) != (size_t)size) {
        perror(path);
        return 1;
    }
    fclose(file);
    LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    return 0;
}

/* Half of the bytes are small: counts and choices are read from them. */
static void
run_random(uint64_t seed, size_t max_len)
{
    rng r = rng_seeded(seed);
    size_t size = rng_below(&r, max_len + 1);
    uint8_t *data = malloc(size + (size == 0));

    if (data == NULL) abort();
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)(rng_below(&r, 2) ? rng_below(&r, 16) : rng_next(&r));
    running = seed;
    LLVMFuzzerTestOneInput(data, size);
    free(data);
}

static uint64_t
option(const char *arg, const char *name, uint64_t otherwise)
{
    size_t n = strlen(name);

    return strncmp(arg, name, n) == 0 ? strtoull(arg + n, NULL, 10) : otherwise;
}

int
main(int argc, char **argv)
{
    uint64_t runs = 0, seed = 1, max_len = 512;

    for (int i = 1; i < argc; i++) {
        runs = option(argv[i], "-runs=", runs);
        seed = option(argv[i], "-seed=", seed);
        max_len = option(argv[i], "-max_len=", max_len);
        if (argv[i][0] != '-' && run_file(argv[i]) != 0) return 1;
    }
    atexit(tell_which);
    signal(SIGABRT, on_abort);
    done = runs == 0;
    for (uint64_t i = 0; i < runs; i++)
        run_random(seed + i, (size_t)max_len);
    done = true;
    printf("%s: %" PRIu64 " inputs\n", argv[0], runs);
    return 0;
}
