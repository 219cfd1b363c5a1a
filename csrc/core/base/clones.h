/* clones.h -- one source, several instruction sets, chosen when the program starts.
 *
 * gcc and the loader pick the best copy of a function marked MT_CLONES. Sanitised builds keep one
 * copy: the resolver runs before the sanitiser is ready. */
#ifndef MT_BASE_CLONES_H
#define MT_BASE_CLONES_H

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__) &&    \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MT_CLONES
#endif

#endif
