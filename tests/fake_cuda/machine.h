/* machine.h -- the fake GPU behind libfakecudart.so: streams, events, memory, and one lock.
 *
 *   stream --> op --> op --> op        copy, zero, write, free, record (reaches a mark), wait (for
 * one)
 *                     |
 *   event ----------> mark <-- wait    a mark is one record of an event, and outlives both
 *
 * Every function here expects gpu.lock to be held. */
#ifndef MT_TESTS_MACHINE_H
#define MT_TESTS_MACHINE_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fakecudart.h"

enum { MAX_DEVICES = 8 };

typedef struct mark {
    int refs; /* the record operation, the event, each wait */
    bool reached;
    struct CUstream_st *stream; /* where the record stands while it is not reached */
} mark;

typedef enum op_kind { OP_COPY, OP_ZERO, OP_WRITE, OP_FREE, OP_RECORD, OP_WAIT } op_kind;

typedef struct op {
    struct op *next;
    unsigned long number; /* in the order of enqueuing */
    op_kind kind;
    void *dst;
    const void *src; /* OP_WRITE owns it */
    size_t bytes;
    mark *mark;
} op;

typedef struct CUstream_st { /* the toolkit's name for *cudaStream_t */
    struct CUstream_st *next;
    int device;
    bool counted; /* made by an entry point, so the test wants it destroyed */
    bool destroyed;
    bool capturing;
    op *first, *last;
} stream;

typedef struct CUevent_st { /* the toolkit's name for *cudaEvent_t */
    struct CUevent_st *next;
    int device;
    mark *mark; /* the latest record; NULL before the first */
} event;

typedef struct block {
    struct block *next;
    void *base;
    size_t bytes;
    bool pinned;
} block;

typedef struct machine {
    pthread_mutex_t lock;
    pthread_cond_t held_changed;
    bool hold; /* threads that wait for an event are kept waiting */
    int held;  /* how many are */
    stream defaults[MAX_DEVICES];
    stream *streams; /* all others */
    event *events;
    block *blocks;
    unsigned long enqueued;
    int devices;
    bool eager;
    uint32_t dice; /* 0: oldest first */
    long fail_at;
    int fail_code;
    long calls, faults, host_syncs, busy_frees, spoiled_captures, misuses;
    long live_streams, queued;
    size_t granularity, capacity; /* of the driver's memory; capacity: bytes of each device */
    size_t taken;                 /* of each device, by programs that are not there */
} machine;

extern machine gpu;
extern _Thread_local int current_device;
extern _Thread_local int current_context; /* the device of the thread's context; -1: it has none */
extern _Thread_local enum cudaStreamCaptureMode capture_mode;

/* Every entry point begins with one of these: takes the lock, and says whether this call is the one
 * to fail. The second is for calls that CUDA forbids while a capture is under way, unless the
 * thread relaxes. */
cudaError_t arrive(void);
cudaError_t arrive_unsafe(void);

/* NULL is the current device's default stream. */
stream *stream_of(void *handle);
/* Walks the default streams, then the others; starts with NULL. */
stream *next_stream(const stream *at);
stream *make_stream(bool counted);
void destroy_stream(stream *s);

/* Appends an operation; an eager machine runs it, and all else that can run. */
void enqueue(stream *to, op what);
size_t run_some(size_t n);
size_t run_stream(stream *s, size_t n);

event *make_event(void);
cudaError_t record(event *e, stream *on);
void wait_for(event *e, stream *on);
/* Runs just what the event's latest record needs. */
void reach_event(event *e);
void free_event(event *e);
long count_events(void);

/* Whether queued work touches any of these bytes. */
bool is_busy(const void *at, size_t bytes);
/* For memory that goes while it is: CUDA waits, or the device faults; whoever relies on that has
 * lost count of its work. Runs everything, and counts. */
void finish_busy(void);

cudaError_t take_block(void **out, size_t bytes, bool pinned);
cudaError_t drop_block(void *base, bool pinned);
/* Whether the whole range is pinned memory; to other host memory CUDA copies synchronously. */
bool is_pinned(const void *at, size_t bytes);
/* Live blocks of these kinds, or their bytes. */
long sum_blocks(bool device, bool pinned, bool in_bytes);

/* ---- fakedriver.c ---- */
void reset_driver(void);
long count_pages(void);
long count_maps(void);
long count_ranges(void);
long count_page_bytes(void);
long count_device_page_bytes(int device);
long count_calls(const char *name);

/* ---- fakecontext.c ---- */
/* A driver call by its name, or NULL. */
void (*context_entry(const char *name))(void);
void use_device(int device); /* it has a context from now on */
void reset_contexts(void);

#endif
