/* nontemporal.h -- copies that do not go through the cache.
 *
 * A record is written once and rarely read, while the interpreter's state, the model's weights and
 * the next layer's activations are wanted again at once: writing around the cache leaves them
 * there, and saves reading the destination's lines first. A copy of 16 KiB through a first-level
 * cache of 32 KiB empties it, and the caller then pays for that. Small pieces and machines without
 * such stores use memcpy. */
#ifndef MT_GATE_NONTEMPORAL_H
#define MT_GATE_NONTEMPORAL_H

#include <stddef.h>

/* From this size on a copy goes around the cache. */
enum { MT_NONTEMPORAL_BYTES = 8 << 10 };

/* As memcpy. When it returns, the bytes are visible as any other store's are. */
void mt_copy_nontemporal(void *dst, const void *src, size_t n);

#endif
