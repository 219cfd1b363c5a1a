#include "gate/nontemporal.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)

#include <emmintrin.h>

enum { LINE = 64 };

/* pre: dst is 16-byte aligned. */
static void
stream_line(unsigned char *dst, const unsigned char *src)
{
    __m128i part[4];

    for (size_t i = 0; i < 4; i++)
        part[i] = _mm_loadu_si128((const __m128i *)(const void *)(src + 16 * i));
    for (size_t i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)(void *)(dst + 16 * i), part[i]);
}

void
mt_copy_nontemporal(void *dst, const void *src, size_t n)
{
    unsigned char *to = dst;
    const unsigned char *from = src;
    size_t head = (LINE - (uintptr_t)to % LINE) % LINE;

    if (n < MT_NONTEMPORAL_BYTES) {
        memcpy(dst, src, n);
        return;
    }
    memcpy(to, from, head);
    for (n -= head, to += head, from += head; n >= LINE; n -= LINE, to += LINE, from += LINE)
        stream_line(to, from);
    memcpy(to, from, n);
    _mm_sfence(); /* streaming stores are ordered with nothing else before this */
}

#else

void
mt_copy_nontemporal(void *dst, const void *src, size_t n)
{
    memcpy(dst, src, n);
}

#endif
