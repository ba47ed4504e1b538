// What ThreadSanitizer and AddressSanitizer have to be told about fibers; nothing at all in an ordinary build.
#pragma once
#include <cstddef>

#if defined(THREAD_SANITIZER)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#elif defined(ADDRESS_SANITIZER)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, size_t* old_bytes);
void __asan_poison_memory_region(const volatile void* address, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
}
#endif

namespace sanitizers {

#if defined(THREAD_SANITIZER)

struct Fiber {
    void* handle = nullptr;
};
constexpr unsigned WITHOUT_ORDER = 1;  // switching does not make what came before visible to what comes after

inline void adopt(Fiber& scheduler) { scheduler.handle = __tsan_get_current_fiber(); }
inline void start(Fiber& fiber, void*, size_t) { fiber.handle = __tsan_create_fiber(0); }
inline void finish(Fiber& fiber) { __tsan_destroy_fiber(fiber.handle); }
inline void leave(Fiber&, Fiber& to, bool) { __tsan_switch_to_fiber(to.handle, WITHOUT_ORDER); }
inline void arrive(Fiber&, Fiber&) {}
inline void acquire(void* token) { __tsan_acquire(token); }
inline void release(void* token) { __tsan_release(token); }
inline void forbid(void*, size_t) {}
inline void allow(void*, size_t) {}

#elif defined(ADDRESS_SANITIZER)

struct Fiber {
    const void* bottom = nullptr;
    size_t bytes = 0;
    void* fake_stack = nullptr;
};

inline void adopt(Fiber&) {}  // the first switch away from the scheduler tells where its stack is
inline void start(Fiber& fiber, void* stack, size_t bytes) { fiber.bottom = stack, fiber.bytes = bytes; }
inline void finish(Fiber&) {}
inline void leave(Fiber& from, Fiber& to, bool for_good) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.bottom, to.bytes);
}
inline void arrive(Fiber& here, Fiber& from) {
    __sanitizer_finish_switch_fiber(here.fake_stack, &from.bottom, &from.bytes);
}
inline void acquire(void*) {}
inline void release(void*) {}
inline void forbid(void* address, size_t bytes) { __asan_poison_memory_region(address, bytes); }
inline void allow(void* address, size_t bytes) { __asan_unpoison_memory_region(address, bytes); }

#else

struct Fiber {};

inline void adopt(Fiber&) {}
inline void start(Fiber&, void*, size_t) {}
inline void finish(Fiber&) {}
inline void leave(Fiber&, Fiber&, bool) {}
inline void arrive(Fiber&, Fiber&) {}
inline void acquire(void*) {}
inline void release(void*) {}
inline void forbid(void*, size_t) {}
inline void allow(void*, size_t) {}

#endif

}  // namespace sanitizers
