/* Bytes to a list of operations on the entries of a byte cache and their model, compared after every
 * one. */
#include "data/model.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_STEPS = 250 };

static void
one_step(rig *g, input *in)
{
    size_t at = g->n > 0 ? input_byte(in) % g->n : 0;

    switch (input_below(in, 12)) {
    case 0:
    case 1:
        if (g->n > 0) rig_touch(g, at);
        break;
    case 2:
        if (g->n > 0) rig_drop(g, at);
        break;
    case 3:
        (void)mt_member_reserve(g->other, input_pair(in) % 700, NULL);
        break;
    case 4:
        mt_member_release(g->other, input_pair(in) % (mt_member_reserved(g->other) + 1));
        break;
    case 5:
        (void)rig_move(g, 1 + input_pair(in) % 700);
        break;
    case 6:
        if (input_below(in, 8) == 0) rig_clear(g);
        break;
    case 7: /* an allocation that fails */
        g->faults.fail_at = g->faults.calls;
        (void)rig_put(g, input_byte(in), input_byte(in), SIZE_MAX);
        g->faults.fail_at = -1;
        break;
    case 8:
        (void)rig_put(g, input_below(in, 8), input_byte(in), at);
        break;
    default:
        (void)rig_put(g, input_below(in, 8), input_byte(in), SIZE_MAX);
        break;
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    rig g;

    rig_begin(&g, 1 + input_pair(&in) % 1000);
    for (int step = 0; step < MOST_STEPS && in.left > 0; step++) {
        one_step(&g, &in);
        rig_check(&g);
    }
    mt_member_release(g.other, mt_member_reserved(g.other));
    rig_end(&g);
    check_cases++;
    return 0;
}
