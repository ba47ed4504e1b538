// A CUDA grid on a CPU: one fiber for each CUDA thread, one after another, in an order that a seed decides.
//
// What a schedule cannot show, the sanitizers do. Fibers are threads to ThreadSanitizer, ordered by __syncthreads and
// by nothing else: neither running one after another nor a warp shuffle orders memory, just as on the GPU. Blocks run
// in OS threads of their own, so that it sees races between blocks as well. AddressSanitizer sees shared memory
// of exactly the size that the launch asked for; without it, what was written behind that shows when the block ends.
#pragma once
#include <cstddef>

namespace fibers {

using Word = unsigned long long;

struct Index {
    unsigned x;
};

struct Launch {
    unsigned grid, block, shared_bytes;
    unsigned seed;  // 0: threads and blocks in the order of their numbers; else shuffled by it
};

constexpr unsigned WARP = 32;
constexpr unsigned MAX_BLOCK = 1024;
constexpr size_t MAX_SHARED = 227 << 10;  // what one block can have on sm_90
constexpr size_t SHARED = 512 << 10;      // and what lies there: with 2048 bins, infinity's would be 476 KiB on

// Runs body(arguments) once for every thread of the grid. Returns 0, or 1 with the reason in `error`: an invalid
// configuration, threads that return while others wait in a barrier, a warp intrinsic that waits for lanes which never
// come or whose caller its own mask does not name, a write behind the block's shared memory.
int run(const Launch& launch, void (*body)(void*), void* arguments, char* error, size_t error_bytes);

void barrier();  // __syncthreads

// Waits until every lane that `mask` names is here, then returns what each of the warp's 32 lanes gave.
const Word* exchange(unsigned mask, Word value);

unsigned lane();

extern __thread Index thread_index, block_index, block_size, grid_size;

}  // namespace fibers

extern __thread unsigned char shared_memory[];  // the dynamic shared memory of the block that runs
