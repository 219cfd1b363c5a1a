/* The parser on bytes from nowhere, and on the bytes of a true history with a few edits.
 *
 *   byte 0 even: the rest is parsed as it is
 *   byte 0 odd:  the next bytes build a small history; what is left edits its dump */
#include "gate/rig.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint64_t corners[] = {
    0,
    1,
    2,
    3,
    7,
    8,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    65535,
    65536,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1ull << 32,
    1ull << 61,
    1ull << 63,
    UINT64_MAX,
    UINT64_MAX / 2,
    UINT64_MAX / 12 + 1,
};

/* True when it parses; what parses must be sound. */
static bool
parses(rig *g, const uint8_t *bytes, size_t size)
{
    mt_gatehist *h;

    if (parse_exactly(g, bytes, size, &h) != MT_OK) return false;
    parsed_is_sound(g, h, bytes, size);
    mt_gatehist_free(h);
    return true;
}

/* A history of a few small entries, as its dump; room for `more` bytes behind it. */
static uint8_t *
build(rig *g, input *in, size_t more, size_t *size)
{
    mt_gatehist_config config = {.max_entries = 1 + input_below(in, 8),
                                 .max_bytes = 16 + input_byte(in),
                                 .trim = (mt_trim)input_below(in, 2),
                                 .keep = (mt_keep)input_below(in, 2),
                                 .dtype = (int)input_below(in, 2) * (1 + MT_BF16) - 1,
                                 .top_k = 1 + (unsigned)input_below(in, 2),
                                 .statistics = input_below(in, 2)};
    size_t experts = 2 + input_below(in, 4), pushes = input_below(in, 12);
    mt_gatehist *h;
    uint8_t *dump;

    CHECK(mt_gatehist_new(&g->mem, &g->vm, &config, &h, NULL) == MT_OK);
    for (size_t i = 0; i < pushes; i++) {
        mt_dtype dtype = (mt_dtype)rng_below(&g->r, MT_DTYPE_COUNT);
        tensor t = tensor_new(&g->r, dtype, rng_below(&g->r, 3), experts, LAYOUT_PACKED);
        (void)mt_gatehist_push(h, &t.rows, NULL);
        tensor_free(&t);
    }
    *size = mt_gatehist_dump_bytes(h);
    dump = model_block(*size + more);
    mt_gatehist_dump(h, dump);
    mt_gatehist_free(h);
    return dump;
}

/* Writes the low `width` bytes of value at a place aligned to it. */
static void
overwrite(uint8_t *dump, size_t size, size_t at, size_t width, uint64_t value)
{
    at = at / width * width;
    if (at + width <= size) memcpy(dump + at, &value, width);
}

/* Adds a small signed number to a field: counts that are nearly right. */
static void
nudge(uint8_t *dump, size_t size, size_t at, size_t width, int by)
{
    uint64_t value = 0;

    at = at / width * width;
    if (at + width > size) return;
    memcpy(&value, dump + at, width);
    value += (uint64_t)(int64_t)by;
    memcpy(dump + at, &value, width);
}

/* `most` bounds the size, whatever is inserted. */
static size_t
edit(input *in, uint8_t *dump, size_t size, size_t most)
{
    size_t kind = input_below(in, 6), at = input_pair(in) % (size + 1);

    if (input_below(in, 2)) at %= 112; /* the headers */
    switch (kind) {
    case 0:
        overwrite(dump, size, at, 1, input_byte(in));
        break;
    case 1:
        overwrite(dump, size, at, 4, corners[input_below(in, 24)]);
        break;
    case 2:
        overwrite(dump, size, at, 8, corners[input_below(in, 24)]);
        break;
    case 3:
        nudge(dump, size, at, input_below(in, 2) ? 4 : 8, (int)input_byte(in) - 128);
        break;
    case 4:
        return mt_size_min(size, at); /* cut off */
    default:
        if (size + 8 > most || at > size) break;
        memmove(dump + at + 8, dump + at, size - at);
        return size + 8;
    }
    return size;
}

/* Edits pile up; one that spoils the dump is mostly taken back, so that more than one can matter.
 */
static void
parse_an_edited_dump(rig *g, input *in)
{
    size_t sound, size, most;
    uint8_t *dump = build(g, in, 64, &sound), *edited;

    most = sound + 64;
    CHECK(parses(g, dump, sound));
    edited = model_block(most);
    memcpy(edited, dump, sound);
    size = sound;
    for (int i = 0; i < 16 && in->left > 0; i++) {
        size = edit(in, edited, size, most);
        if (parses(g, edited, size)) {
            memcpy(dump, edited, size);
            sound = size;
        } else if (input_below(in, 4) != 0) {
            memcpy(edited, dump, sound);
            size = sound;
        }
    }
    free(dump);
    free(edited);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static rig g;
    input in = {data, size};

    rig_prepare(&g, size > 1 ? data[1] : 0);
    if (input_byte(&in) % 2 == 0)
        (void)parses(&g, in.at, in.left);
    else
        parse_an_edited_dump(&g, &in);
    CHECK(g.fault.live == 0);
    check_cases++;
    return 0;
}
