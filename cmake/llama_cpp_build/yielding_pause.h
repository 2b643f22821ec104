/* Forced into ggml's C sources for x86-64, where its threads wait for each other in a loop of `pause` instructions.
 * On a busy machine a waiting thread then burns the time slice that the awaited one needs. So every 256th pause also
 * offers the core to whoever wants it, which costs nothing where nobody does. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__cplusplus)
#include <immintrin.h>
#include <sched.h>

static inline void paceline_pause(void) {
    static __thread unsigned num_pauses = 0;
    _mm_pause();
    if ((++num_pauses & 255u) == 0) {
        sched_yield();
    }
}

#define _mm_pause paceline_pause
#endif
