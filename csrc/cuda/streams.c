#include "cuda/streams.h"

#include <assert.h>

struct mt_custream {
    mt_custream *next;
    void *stream;
};

static mt_status
is_captured(mt_custreams *s, void *stream, bool *out, mt_error *err)
{
    return s->dev->stream_capturing(s->dev->ctx, s->device, stream, out, err);
}

static mt_status
streams_record(mt_custreams *s, void *stream, mt_error *err)
{
    assert(s->event != NULL);
    return s->dev->event_record(s->dev->ctx, s->device, s->event, stream, err);
}

static mt_status
remember(mt_custreams *s, void *stream, mt_error *err)
{
    mt_custream *new;

    for (const mt_custream *at = s->seen; at != NULL; at = at->next)
        if (at->stream == stream) return MT_OK;
    if ((new = s->mem.get(s->mem.ctx, sizeof *new)) == NULL)
        return mt_fail(err, MT_ENOMEM, "mt_custreams", 0);
    *new = (mt_custream){.next = s->seen, .stream = stream};
    s->seen = new;
    return MT_OK;
}

/* Orders the stream in use behind the last one; where either is captured there is no such order. */
static mt_status
streams_follow(mt_custreams *s, bool *captured, mt_error *err)
{
    bool last_captured = false;
    mt_status st = is_captured(s, s->now, captured, err);

    if (st != MT_OK || *captured || s->now == s->last) return st;
    if ((st = remember(s, s->now, err)) != MT_OK) return st;
    if ((st = is_captured(s, s->last, &last_captured, err)) != MT_OK) return st;
    if (!last_captured) {
        if ((st = streams_record(s, s->last, err)) != MT_OK) return st;
        st = s->dev->stream_wait(s->dev->ctx, s->device, s->now, s->event, err);
    }
    if (st == MT_OK) s->last = s->now;
    return st;
}

mt_status
mt_custreams_init(mt_custreams *s, const mt_alloc *mem, const mt_dev_ops *dev, int device,
                  mt_error *err)
{
    mt_status st;

    *s = (mt_custreams){.mem = *mem, .dev = dev, .device = device};
    st = remember(s, s->now, err);
    return st == MT_OK ? dev->event_new(dev->ctx, device, &s->event, err) : st;
}

void
mt_custreams_fini(mt_custreams *s, bool forked)
{
    while (s->seen != NULL) {
        mt_custream *at = s->seen;

        s->seen = at->next;
        s->mem.put(s->mem.ctx, at, sizeof *at);
    }
    if (s->event != NULL && !forked) s->dev->event_free(s->dev->ctx, s->device, s->event);
    s->event = NULL;
}

mt_status
mt_custreams_use(mt_custreams *s, void *stream, mt_error *err)
{
    void *before = s->now;
    bool captured = false;
    mt_status st;

    if (stream == s->now && stream == s->last) return MT_OK;
    s->now = stream;
    st = streams_follow(s, &captured, err);
    if (st != MT_OK) s->now = before;
    return st;
}

mt_status
mt_custreams_ready(mt_custreams *s, mt_error *err)
{
    bool captured = false;
    mt_status st = streams_follow(s, &captured, err);

    if (st != MT_OK || !captured) return st;
    return mt_fail(err, MT_EDEVICE,
                   "pages cannot be mapped or copied during CUDA graph capture; reserve the tokens "
                   "before it begins",
                   0);
}

mt_status
mt_custreams_wait(mt_custreams *s, mt_error *err)
{
    mt_status st = MT_OK;

    for (const mt_custream *at = s->seen; at != NULL && st == MT_OK; at = at->next) {
        bool captured = false;

        st = is_captured(s, at->stream, &captured, err);
        if (st != MT_OK || captured) continue;
        if ((st = streams_record(s, at->stream, err)) == MT_OK)
            st = s->dev->event_wait(s->dev->ctx, s->device, s->event, err);
    }
    return st;
}
