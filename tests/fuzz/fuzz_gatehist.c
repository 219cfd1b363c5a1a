/* Bytes to a list of operations on a gate history and its model, compared after every one. */
#include "gate/rig.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PENDING = 6, MOST_STEPS = 200 };

/* Entries that were claimed and have not arrived. */
typedef struct pending {
    tensor late[PENDING];
    uint64_t number[PENDING];
    size_t n;
} pending;

static mt_gatehist_config
take_config(input *in, size_t *experts)
{
    static const int dtypes[] = {MT_DTYPE_SAME, MT_F32, MT_F64, MT_F16, MT_BF16};
    mt_gatehist_config c = {.max_entries = 1 + input_below(in, 24),
                            .max_bytes = 1 + input_pair(in) % 2048,
                            .trim = (mt_trim)input_below(in, 2),
                            .keep = (mt_keep)input_below(in, 2),
                            .dtype = dtypes[input_below(in, 5)],
                            .top_k = 1 + (unsigned)input_below(in, 4),
                            .statistics = input_below(in, 4) != 0};

    *experts = c.top_k + input_below(in, 20);
    return c;
}

static tensor
take_tensor(rig *g, input *in, size_t experts)
{
    mt_dtype dtype = (mt_dtype)input_below(in, MT_DTYPE_COUNT);
    layout how = (layout)input_below(in, LAYOUTS);
    size_t rows = input_below(in, 24);

    return tensor_new(&g->r, dtype, rows, experts, how);
}

static void
push(rig *g, input *in, size_t experts)
{
    tensor t = take_tensor(g, in, experts);

    rig_push_rows(g, &t.rows);
    tensor_free(&t);
}

static void
claim(rig *g, input *in, pending *p, size_t experts)
{
    tensor t = take_tensor(g, in, experts);

    if (p->n == PENDING || mt_gatehist_admit(g->h, &t.rows, NULL) != MT_OK) {
        tensor_free(&t);
        return;
    }
    p->late[p->n] = t;
    p->number[p->n] = mt_gatehist_claim(g->h, &t.rows);
    CHECK(p->number[p->n] == model_claim(&g->m, &t.rows));
    p->n++;
}

static void
fill(rig *g, pending *p, size_t i)
{
    mt_gatehist_fill(g->h, p->number[i], &p->late[i].rows);
    model_fill(&g->m, p->number[i], &p->late[i].rows);
    tensor_free(&p->late[i]);
    p->n--;
    p->late[i] = p->late[p->n];
    p->number[i] = p->number[p->n];
}

static void
slice(rig *g, input *in)
{
    size_t len = g->m.len, start = input_byte(in), count = input_byte(in);
    ptrdiff_t step = 1 + (ptrdiff_t)input_below(in, 4);

    if (!model_all_filled(&g->m) || len == 0) return;
    start %= len;
    if (count % 2) {
        count = mt_size_min(count / 2, start / (size_t)step + 1);
        step = -step;
    } else {
        count = mt_size_min(count / 2, (len - start + (size_t)step - 1) / (size_t)step);
    }
    rig_slice(g, start, step, count);
}

static void
recount(rig *g, input *in)
{
    size_t n = input_byte(in) % (g->m.len + 1);
    model_sums want;
    mt_gatestats s;

    if (!model_all_filled(&g->m) || g->m.experts == 0) return;
    want = model_recount(&g->m, n);
    mt_gatestats_init(&s, &mt_alloc_libc, g->m.config.top_k);
    CHECK(mt_gatestats_reserve(&s, g->m.experts, NULL) == MT_OK);
    mt_gatehist_recount(g->h, n, &s);
    sums_agree(&want, &s);
    mt_gatestats_fini(&s);
    model_sums_free(&want);
}

/* A push, a slice or an admit of another width while the n-th allocation fails. */
static void
step_with_a_fault(rig *g, input *in, size_t experts)
{
    size_t pick = input_below(in, 3);

    rig_fail(g, (long)input_below(in, 6));
    if (pick == 0) push(g, in, experts);
    if (pick == 1) slice(g, in);
    if (pick == 2) {
        mt_rows other = mt_rows_packed(NULL, MT_F32, 1, experts + 1);
        (void)mt_gatehist_admit(g->h, &other, NULL);
    }
    rig_fail(g, -1);
}

static void
one_step(rig *g, input *in, pending *p, size_t experts)
{
    switch (input_below(in, 16)) {
    case 0:
        mt_gatehist_clear(g->h);
        model_clear(&g->m);
        break;
    case 1:
        mt_gatehist_reset_stats(g->h);
        model_reset_stats(&g->m);
        break;
    case 2:
        slice(g, in);
        break;
    case 3:
        recount(g, in);
        break;
    case 4:
        step_with_a_fault(g, in, experts);
        break;
    case 5:
        push(g, in, 1 + input_below(in, 30));
        break; /* most often the wrong width */
    case 6:
    case 7:
        claim(g, in, p, experts);
        break;
    case 8:
    case 9:
        if (p->n > 0) fill(g, p, input_below(in, p->n));
        break;
    case 10:
        if (model_all_filled(&g->m)) state_round_trips(g, g->h);
        break;
    default:
        push(g, in, experts);
        break;
    }
    model_agrees(&g->m, g->h);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static rig g;
    input in = {data, size};
    pending p = {.n = 0};
    size_t experts;
    mt_gatehist_config config = take_config(&in, &experts);

    rig_begin(&g, &config, input_byte(&in));
    for (int step = 0; step < MOST_STEPS && in.left > 0; step++)
        one_step(&g, &in, &p, g.m.appended > 0 ? g.m.experts : experts);
    while (p.n > 0)
        fill(&g, &p, 0);
    model_agrees(&g.m, g.h);
    rig_end(&g);
    check_cases++;
    return 0;
}
