/* store.h -- mt_store_ops by the CUDA driver's virtual memory.
 *
 *   pages (handles)   [ 0 ][ 1 ][ 2 ] -  [ 4 ]            made by take, released by drop
 *                       |   / |    \       :
 *   home              [ 0 ][ 0 ][ 1 ][z ][   ]            arena: mapped by map, map_zero; z is one
 *   window            [   ][   ][ 2 ][   ][ 4 ]           page of zeros, of all. Window: on demand
 *
 * Not lazy: what is not mapped must not be touched. A page is mapped whole and separately, so a
 * large page_bytes makes few calls, at the price of what its last tokens leave unused. A new page
 * is zeroed on the stream in use when it is first mapped or shown in a window; the page of zeros is
 * zeroed again at every map_zero, and physical() does not count it.
 *
 * Streams. Copies and zeroing run on the stream in use. Whatever takes a mapping away first waits,
 * on the host, for all that was enqueued on any stream ever named by use_stream: they must live as
 * long as the store. A stream that is being captured into a CUDA graph cannot be waited for: what
 * was enqueued on it before the capture began counts as done (torch.cuda.graph synchronises there).
 * While the stream in use is captured, only calls that enqueue nothing and replace nothing succeed:
 * take, and map of pages that were mapped before at addresses where nothing is. The others fail
 * with MT_EDEVICE and native 0.
 *
 * Where a call that cannot fail is refused by the driver, it has no effect: addresses stay mapped
 * and are unmapped by the next call that replaces or drops what they show; pages stay physical, and
 * physical() says so, and are zeroed before they are used again. In a child made by fork(), close()
 * leaves the device alone. */
#ifndef MT_CUDA_STORE_H
#define MT_CUDA_STORE_H

#include "core/base/alloc.h"
#include "core/base/forks.h"
#include "core/port/store.h"
#include "cuda/runtime.h"

/* A store of no bytes on `device`, made where `birth` says; out->close gives everything back, but in
 * a child that was forked since. Borrows rt until then.
 * page_bytes is a power of two and a multiple of the driver's granularity (2 MiB on the devices of
 * today), else MT_ESHAPE (page_bytes) with the granularity as limit; 0: that granularity. *out is
 * written on MT_OK only. MT_ENOMEM; MT_EDEVICE, also where memtools was built without CUDA. */
mt_status mt_store_cuda_new(const mt_alloc *mem, mt_cudart *rt, int device, size_t page_bytes,
                            const mt_birth *birth, mt_store_ops *out, mt_error *err);

#endif
