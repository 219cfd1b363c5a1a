/* How this file works. Rows become copies of other rows: beams reorder, finished samples leave.
 *
 *   before   row 0: A A a    row 1: A B b          index = [1, 1]
 *   after    row 0: A B b'   row 1: A B b          b': a copy of b, in row 0's block of that place
 *
 * Full blocks are shared by naming. The last, partial block of a row is written to next, so it is
 * copied at once, into the block that the row has at that place. If another row needs what that
 * block holds, it is copied first; rows that need each other's blocks in a ring take one block more.
 *
 * What code wrote privately into rows that are copied is put into blocks before all this
 * (mt_kvwritten_save), and what it wrote into those that become others is dropped after it. All
 * blocks are taken, and all addresses leave what only others will have, before anything is written:
 * from then on, on a host, nothing can fail. Where a device fails, rows that were copied over each
 * other have lost tokens of their last block. */
#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/kv.h"
#include "kv/mapping.h"
#include "kv/prepare.h"

typedef struct move { /* the partial block of one new row */
    size_t row, source, place, tokens;
    uint32_t to, from; /* blocks; `to` is named by this move already */
    bool fresh;        /* `to` was taken now */
    bool waits;        /* not copied yet */
} move;

typedef struct plan {
    mt_kvlease *lease;
    const size_t *index;
    size_t n;
    uint32_t *table;       /* [n x blocks] as it will be */
    size_t *taken;         /* [n] */
    move *moves;           /* [n + 1] the moves, then a spare block where there are rings */
    mt_kvwritten *written; /* [rows] as they were before */
    size_t rows;
    size_t move_count, spare_count;
    size_t promised;
} plan;

static size_t
partial_tokens(const mt_kvlease *lease, size_t row)
{
    return mt_kvlease_row_tokens(lease, row) % lease->pool->geom.block_tokens;
}

/* The block that the row has for itself at the place of its last, partial one. */
static bool
has_own_partial(const mt_kvlease *lease, size_t row, size_t place)
{
    const mt_kvslot *s = mt_kvlease_slot(lease, row);

    if (row >= lease->rows || partial_tokens(lease, row) == 0) return false;
    if (mt_kvlease_blocks(lease, row) != place + 1 || s->table[place] == MT_KV_ZERO) return false;
    return mt_kvblock_at(lease->pool, s->table[place])->refs == 1;
}

/* The new row's table; its last block, when it is partial and another row's, as a move. */
static void
plan_row(plan *p, size_t row)
{
    const mt_kvlease *lease = p->lease;
    size_t source = p->index[row], tokens = partial_tokens(lease, source);
    size_t n = lease->pool->geom.blocks, taken = mt_kvlease_blocks(lease, source);
    uint32_t *table = p->table + row * n;

    memcpy(table, mt_kvlease_slot(lease, source)->table, taken * sizeof *table);
    p->taken[row] = taken;
    if (source == row || tokens == 0 || table[taken - 1] == MT_KV_ZERO) return;
    p->moves[p->move_count++] = (move){.row = row,
                                       .source = source,
                                       .place = taken - 1,
                                       .tokens = tokens,
                                       .from = table[taken - 1],
                                       .waits = true};
}

/* Whether another move still has to read the block that this one writes. */
static bool
reorder_is_wanted(const plan *p, const move *by)
{
    for (size_t i = 0; i < p->move_count; i++) {
        const move *m = &p->moves[i];

        if (m != by && m->waits && m->from == by->to) return true;
    }
    return false;
}

/* Zeros behind the tokens in a new block: a view from before may show it. */
static mt_status
copy_move(plan *p, move *m, mt_error *err)
{
    mt_kvpool *pool = p->lease->pool;
    mt_status st = mt_kvblock_copy(pool, m->to, m->from, m->tokens, SIZE_MAX, 0, err);

    pool->ever.copied++;
    return st == MT_OK && m->fresh ? mt_kvblock_zero(pool, m->to, m->tokens, err) : st;
}

/* Copies each move whose target no waiting move needs as its source, until only rings are left;
 * `dry`: copies nothing. */
static mt_status
copy_chains(plan *p, bool dry, mt_error *err)
{
    mt_status st = MT_OK;
    bool progress = true;

    while (progress) {
        progress = false;
        for (size_t i = 0; st == MT_OK && i < p->move_count; i++) {
            move *m = &p->moves[i];

            if (!m->waits || reorder_is_wanted(p, m)) continue;
            m->waits = false;
            progress = true;
            if (!dry) st = copy_move(p, m, err);
        }
    }
    return st;
}

static const move *
first_waiting(const plan *p)
{
    for (size_t i = 0; i < p->move_count; i++)
        if (p->moves[i].waits) return &p->moves[i];
    return NULL;
}

/* One spare block does for all rings: one that is broken runs to its end before the next one is. */
static void
find_rings(plan *p)
{
    const move *ring;

    (void)copy_chains(p, true, NULL);
    if ((ring = first_waiting(p)) != NULL) {
        p->spare_count = 1;
        p->moves[p->move_count] = (move){.row = ring->row, .place = ring->place, .to = MT_KV_ZERO};
    }
    for (size_t i = 0; i < p->move_count; i++)
        p->moves[i].waits = true;
}

static mt_status
take_places(plan *p, mt_error *err)
{
    mt_status st = MT_OK;

    for (size_t i = 0; st == MT_OK && i < p->move_count + p->spare_count; i++) {
        move *m = &p->moves[i];

        if (m->to != MT_KV_ZERO) continue;
        st = mt_kvblock_take(p->lease, p->lease->first + m->row, m->place, MT_KV_ANY, &m->to, err);
        m->fresh = st == MT_OK;
    }
    return st;
}

/* Where each move goes: over the row's own partial block, or into a new one. */
static mt_status
find_places(plan *p, mt_error *err)
{
    mt_kvlease *lease = p->lease;
    size_t more = 0;
    mt_status st;

    for (size_t i = 0; i < p->move_count; i++) {
        move *m = &p->moves[i];

        m->to = MT_KV_ZERO;
        if (has_own_partial(lease, m->row, m->place))
            m->to = mt_kvlease_slot(lease, m->row)->table[m->place];
        more += m->to == MT_KV_ZERO;
    }
    find_rings(p);
    more += p->spare_count;
    more = more > lease->promised ? more - lease->promised : 0;
    if ((st = mt_kvblock_promise(lease, more, err)) != MT_OK) return st;
    p->promised = more;
    return take_places(p, err);
}

/* Saves the content that keeps a ring waiting in the spare block. */
static mt_status
break_ring(plan *p, const move *m, mt_error *err)
{
    mt_kvpool *pool = p->lease->pool;
    uint32_t spare = p->moves[p->move_count].to;
    mt_status st;

    assert(p->spare_count == 1);
    st = mt_kvblock_copy(pool, spare, m->to, pool->geom.block_tokens, SIZE_MAX, 0, err);
    for (size_t i = 0; st == MT_OK && i < p->move_count; i++)
        if (p->moves[i].waits && p->moves[i].from == m->to) p->moves[i].from = spare;
    return st;
}

static mt_status
copy_all(plan *p, mt_error *err)
{
    mt_status st = copy_chains(p, false, err);
    const move *ring;

    while (st == MT_OK && (ring = first_waiting(p)) != NULL) {
        st = break_ring(p, ring, err);
        if (st == MT_OK) st = copy_chains(p, false, err);
    }
    return st;
}

/* --- addresses --- */

/* The row's addresses leave what its table will not name and others will; all, where that takes too
 * many map areas, unless the row goes on as it is and has what is nowhere else. */
static mt_status
change_row(plan *p, size_t row, mt_error *err)
{
    mt_kvpool *pool = p->lease->pool;
    size_t slot = p->lease->first + row, taken = row < p->n ? p->taken[row] : 0;
    const uint32_t *table = row < p->n ? p->table + row * pool->geom.blocks : NULL;
    uint32_t own = MT_KV_ZERO;
    mt_status st;

    for (size_t i = 0; i < p->move_count; i++)
        if (p->moves[i].row == row) own = p->moves[i].to;
    if ((st = mt_kvmap_leave_for_table(pool, slot, table, taken, own, err)) != MT_EAGAIN) return st;
    if (row < p->n && p->index[row] == row && mt_kvmap_has_private(pool, slot, taken))
        return mt_fail(err, MT_ENOMEM, MT_STORE_MAPS, 0);
    return mt_kvmap_zeros(pool, slot, err);
}

static void
count_name(const mt_kvpool *pool, uint32_t block, bool more)
{
    if (block == MT_KV_ZERO) return;
    mt_kvblock_at(pool, block)->refs += more ? 1 : UINT32_MAX;
}

/* Names are counted as they are to be after the change, for mt_kvmap_leave_for_table; or as they
 * are. */
static void
reorder_count_names(const plan *p, bool after)
{
    const mt_kvpool *pool = p->lease->pool;

    for (size_t row = 0; row < p->n; row++)
        for (size_t place = 0; place < p->taken[row]; place++)
            count_name(pool, p->table[row * pool->geom.blocks + place], after);
    for (size_t row = 0; row < p->lease->rows; row++) {
        const mt_kvslot *s = mt_kvlease_slot(p->lease, row);

        for (size_t place = 0; place < s->taken; place++)
            count_name(pool, s->table[place], !after);
    }
}

/* Of rows [0, end), as far as the system lets it be; else when they are used, or when another row
 * takes what they may show of others. */
static void
restore_rows(const plan *p, size_t end)
{
    mt_kvlease *lease = p->lease;
    mt_kvpool *pool = lease->pool;

    for (size_t row = 0; row < end; row++) {
        bool good = mt_kvmap_restore(pool, lease->first + row) == MT_OK;

        mt_kvprepare_forget_maps(lease, row);
        for (size_t place = 0; !good && row < p->n && place < p->taken[row]; place++)
            if (p->table[row * pool->geom.blocks + place] != MT_KV_ZERO)
                mt_kvblock_note_shown(pool, lease->first + row,
                                      p->table[row * pool->geom.blocks + place]);
    }
}

/* pre: all blocks are taken. */
static mt_status
change_rows(plan *p, mt_error *err)
{
    mt_kvlease *lease = p->lease;
    size_t n = lease->pool->geom.blocks, row;
    mt_status st = MT_OK;

    for (size_t i = 0; i < p->move_count; i++)
        p->table[p->moves[i].row * n + p->moves[i].place] = p->moves[i].to;
    reorder_count_names(p, true);
    for (row = 0; st == MT_OK && row < lease->max_rows; row++)
        st = change_row(p, row, err);
    reorder_count_names(p, false);
    if (st == MT_OK) st = copy_all(p, err);
    if (st != MT_OK) restore_rows(p, row);
    return st;
}

/* --- the change --- */

static void
copy_lengths(plan *p)
{
    mt_kvlease *lease = p->lease;
    mt_kvunit_marks *old = lease->unit_marks; /* free to use: nothing stays ready */

    for (size_t layer = 0; layer < lease->pool->geom.config.layers; layer++) {
        for (size_t row = 0; row < lease->rows; row++)
            old[row].mapped_to = mt_kvlease_marks(lease, layer, row)->length;
        for (size_t row = 0; row < lease->max_rows; row++)
            mt_kvlease_set_length(lease, layer, row, row < p->n ? old[p->index[row]].mapped_to : 0);
    }
}

/* What the row has in both tables it has at the same place: that goes on being named. The rest its
 * addresses may show. Other rows that let go of such a block as well may name it still: none does
 * in the end, or this row's addresses have left it. */
static void
let_go_of_row(const plan *p, size_t row)
{
    mt_kvpool *pool = p->lease->pool;
    mt_kvslot *s = mt_kvlease_slot(p->lease, row);
    const uint32_t *table = p->table + row * pool->geom.blocks;

    for (size_t place = 0; place < s->taken; place++) {
        uint32_t block = s->table[place];
        bool stays = row < p->n && place < p->taken[row] && table[place] == block;

        if (!stays && block != MT_KV_ZERO)
            mt_kvblock_note_shown(pool, p->lease->first + row, block);
        mt_kvblock_unname(pool, block);
    }
    s->taken = 0;
}

/* What the row wrote privately over blocks that it has still, or that were copied over, is not the
 * other row's. Where it cannot be dropped the addresses map their blocks again. */
static void
drop_written(const plan *p, size_t row)
{
    mt_kvpool *pool = p->lease->pool;
    size_t slot = p->lease->first + row;

    if (row < p->rows && p->written[row] == MT_KV_PLAIN) return;
    if (mt_kvmap_drop_private(pool, slot) == MT_OK) return;
    for (size_t place = 0; place < pool->slots[slot].taken; place++)
        mt_kvmap_forget_private(pool, slot, place, pool->slots[slot].table[place]);
}

/* Names the new before it lets go of the old: what both have stays. */
static void
reorder_commit(plan *p)
{
    mt_kvlease *lease = p->lease;
    mt_kvpool *pool = lease->pool;
    size_t n = pool->geom.blocks;
    const move *spare = &p->moves[p->move_count];

    for (size_t row = 0; row < p->n; row++)
        for (size_t place = 0; place < p->taken[row]; place++)
            mt_kvblock_name(pool, p->table[row * n + place]);
    for (size_t i = 0; i < p->move_count; i++) /* named once by the take */
        if (p->moves[i].fresh) mt_kvblock_unname(pool, p->moves[i].to);
    if (p->spare_count > 0) { /* a view from before, or of an exposed row, may show it */
        (void)mt_kvblock_zero(pool, spare->to, 0, NULL);
        mt_kvblock_untake(lease, lease->first + spare->row, spare->to, false);
    }
    for (size_t row = 0; row < lease->rows; row++)
        let_go_of_row(p, row);
    for (size_t row = 0; row < p->n; row++) {
        mt_kvslot *s = mt_kvlease_slot(lease, row);

        s->taken = p->taken[row];
        s->reach = mt_size_max(s->reach, s->taken);
        memcpy(s->table, p->table + row * n, s->taken * sizeof *s->table);
    }
    copy_lengths(p);
    lease->rows = p->n;
    for (size_t row = 0; row < lease->max_rows; row++)
        mt_kvprepare_forget_maps(lease, row);
    for (size_t row = 0; row < p->n; row++)
        if (p->index[row] != row) drop_written(p, row);
}

static void
reorder_undo(plan *p)
{
    for (size_t i = 0; i < p->move_count + p->spare_count; i++) {
        const move *m = &p->moves[i];

        if (m->fresh) mt_kvblock_untake(p->lease, p->lease->first + m->row, m->to, false);
    }
}

static mt_status
reorder_locked(void *arg, mt_error *err)
{
    plan *p = arg;
    mt_status st;

    p->move_count = p->spare_count = p->promised = 0;
    for (size_t row = 0; row < p->n; row++)
        plan_row(p, row);
    st = find_places(p, err);
    if (st == MT_OK) st = change_rows(p, err);
    if (st == MT_OK)
        reorder_commit(p);
    else
        reorder_undo(p);
    mt_kvblock_unpromise(p->lease, mt_size_min(p->promised, p->lease->promised));
    return st;
}

mt_status
mt_kvlease_reorder(mt_kvlease *lease, const size_t *index, size_t n, mt_error *err)
{
    plan p = {.lease = lease, .index = index, .n = n, .rows = lease->rows};
    const mt_alloc *mem = &lease->pool->mem;
    size_t places = n * lease->pool->geom.blocks;
    mt_status st;

    assert(n > 0 && n <= lease->max_rows);
    for (size_t i = 0; i < n; i++)
        assert(index[i] < lease->rows);
    p.table = mt_alloc_zeroed(mem, places, sizeof *p.table);
    p.taken = mt_alloc_zeroed(mem, n, sizeof *p.taken);
    p.moves = mt_alloc_zeroed(mem, n + 1, sizeof *p.moves);
    p.written = mt_alloc_zeroed(mem, p.rows, sizeof *p.written);
    st = p.table != NULL && p.taken != NULL && p.moves != NULL && p.written != NULL
             ? mt_kvwritten_save(lease, index, n, p.written, err)
             : mt_fail(err, MT_ENOMEM, "kvpool", 0);
    if (st == MT_OK) st = mt_kvpool_retry(lease->pool, reorder_locked, &p, err);
    mem->put(mem->ctx, p.table, places * sizeof *p.table);
    mem->put(mem->ctx, p.taken, n * sizeof *p.taken);
    mem->put(mem->ctx, p.moves, (n + 1) * sizeof *p.moves);
    mem->put(mem->ctx, p.written, p.rows * sizeof *p.written);
    return st;
}
