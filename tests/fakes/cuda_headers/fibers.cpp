// The scheduler of fibers.h. Never compiled with -fsanitize itself: the sanitizers are told about the fibers, and must
// not see the scheduler's own accesses. -DTHREAD_SANITIZER or -DADDRESS_SANITIZER says which one the kernels have.
#include "fibers.h"

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sanitizers.h"

__thread unsigned char shared_memory[fibers::SHARED] __attribute__((aligned(128)));

namespace fibers {

__thread Index thread_index, block_index, block_size, grid_size;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned char GARBAGE = 0xCD;  // what uninitialised memory holds

enum class State { READY, AT_BARRIER, IN_WARP, RETURNED };

struct Fiber {
    ucontext_t context;
    sanitizers::Fiber sanitizer;
    State state = State::READY;
    unsigned mask = 0;    // of the warp intrinsic it waits in
    Word given = 0;       // its value there
    Word received[WARP];  // what all lanes gave
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
};

// One block while it runs. The tokens are addresses by which ThreadSanitizer orders: one for the launch and its end,
// two that barriers use in turn, so that an early arrival at the next orders nothing for those still leaving this one.
struct Block {
    std::vector<Fiber> fibers;
    ucontext_t scheduler;
    sanitizers::Fiber scheduler_sanitizer;
    void (*body)(void*);
    void* arguments;
    unsigned running = 0;
    unsigned barriers = 0;
    char launch_token, barrier_tokens[2];
    std::string error;

    Fiber& current() { return fibers[running]; }
};

__thread Block* block;

void suspend(State state) {
    Fiber& fiber = block->current();
    fiber.state = state;
    sanitizers::leave(fiber.sanitizer, block->scheduler_sanitizer, state == State::RETURNED);
    swapcontext(&fiber.context, &block->scheduler);
    sanitizers::arrive(fiber.sanitizer, block->scheduler_sanitizer);
}

void fiber_main() {
    sanitizers::arrive(block->current().sanitizer, block->scheduler_sanitizer);
    sanitizers::acquire(&block->launch_token);
    block->body(block->arguments);
    sanitizers::release(&block->launch_token);
    suspend(State::RETURNED);
}

void resume(unsigned thread) {
    block->running = thread;
    thread_index = {thread};
    Fiber& fiber = block->fibers[thread];
    sanitizers::leave(block->scheduler_sanitizer, fiber.sanitizer, false);
    swapcontext(&block->scheduler, &fiber.context);
    sanitizers::arrive(block->scheduler_sanitizer, fiber.sanitizer);
}

// Pseudo-random numbers, the same on every machine (xorshift64).
struct Random {
    uint64_t state;
    unsigned below(unsigned bound) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return unsigned(state % bound);
    }
    void shuffle(std::vector<unsigned>& order) {
        for (unsigned n = unsigned(order.size()); n > 1; --n) std::swap(order[n - 1], order[below(n)]);
    }
};

std::vector<unsigned> numbers(unsigned count) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; ++i) order[i] = i;
    return order;
}

bool intact(const unsigned char* from, const unsigned char* to) {
    return std::all_of(from, to, [](unsigned char byte) { return byte == GARBAGE; });
}

unsigned count_of(State state) {
    unsigned count = 0;
    for (const Fiber& fiber : block->fibers) count += fiber.state == state;
    return count;
}

// Lets the lanes of one warp go on whose masks are complete. False if there are none.
bool release_lanes(unsigned first) {
    const unsigned lanes = std::min<size_t>(WARP, block->fibers.size() - first);
    Fiber* warp = &block->fibers[first];
    bool released = false;
    for (unsigned waiting = 0; waiting < lanes; ++waiting) {
        if (warp[waiting].state != State::IN_WARP) continue;
        const unsigned mask = warp[waiting].mask;
        bool complete = lanes == WARP || mask >> lanes == 0;
        for (unsigned l = 0; l < lanes; ++l)
            if (mask >> l & 1) complete &= warp[l].state == State::IN_WARP && warp[l].mask == mask;
        if (!complete) continue;
        for (unsigned l = 0; l < lanes; ++l) {
            if (!(mask >> l & 1)) continue;
            for (unsigned from = 0; from < lanes; ++from) warp[l].received[from] = warp[from].given;
            warp[l].state = State::READY;
        }
        released = true;
    }
    return released;
}

// One turn for every thread that can run. False when the block is stuck or has gone wrong, the reason in `error`.
bool turn(const std::vector<unsigned>& order) {
    bool moved = false;
    for (unsigned thread : order) {
        if (block->fibers[thread].state != State::READY) continue;
        resume(thread);
        moved = true;
        if (!block->error.empty()) return false;
    }
    for (unsigned first = 0; first < block->fibers.size(); first += WARP) moved |= release_lanes(first);
    const unsigned returned = count_of(State::RETURNED), waiting = count_of(State::AT_BARRIER);
    if (waiting == block->fibers.size()) {
        ++block->barriers;
        for (Fiber& fiber : block->fibers) fiber.state = State::READY;
    } else if (waiting > 0 && returned + waiting == block->fibers.size()) {
        block->error = "barrier divergence: " + std::to_string(returned) + " threads returned while " +
                       std::to_string(waiting) + " wait in __syncthreads";
    } else if (!moved && returned < block->fibers.size()) {
        block->error = "deadlock: a warp intrinsic waits for lanes that its mask names and that never come";
    }
    return block->error.empty();
}

void start_fibers() {
    for (Fiber& fiber : block->fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
        sanitizers::start(fiber.sanitizer, fiber.stack.get(), STACK_BYTES);
    }
}

// Runs one block and returns what went wrong. `retired` receives the sanitizer's side of its fibers.
std::string run_block(const Launch& launch, unsigned index, void (*body)(void*), void* arguments,
                      std::vector<sanitizers::Fiber>& retired) {
    Block state{};
    block = &state;
    state.body = body, state.arguments = arguments;
    block_index = {index}, block_size = {launch.block}, grid_size = {launch.grid};
    state.fibers = std::vector<Fiber>(launch.block);
    unsigned char* const behind = shared_memory + launch.shared_bytes;
    std::memset(shared_memory, GARBAGE, SHARED);
    sanitizers::forbid(behind, SHARED - launch.shared_bytes);
    sanitizers::adopt(state.scheduler_sanitizer);
    sanitizers::release(&state.launch_token);
    start_fibers();
    std::vector<unsigned> order = numbers(launch.block);
    Random random{launch.seed * 0x9E3779B97F4A7C15ull + index + 1};
    do {
        if (launch.seed != 0) random.shuffle(order);
    } while (turn(order) && count_of(State::RETURNED) < launch.block);
    sanitizers::acquire(&state.launch_token);
    for (Fiber& fiber : state.fibers) retired.push_back(fiber.sanitizer);
    sanitizers::allow(behind, SHARED - launch.shared_bytes);
    if (state.error.empty() && !intact(behind, shared_memory + SHARED))
        state.error = "written behind the " + std::to_string(launch.shared_bytes) + " bytes of shared memory";
    return state.error;
}

}  // namespace

void barrier() {
    char* token = &block->barrier_tokens[block->barriers % 2];
    sanitizers::release(token);
    suspend(State::AT_BARRIER);
    sanitizers::acquire(token);
}

const Word* exchange(unsigned mask, Word value) {
    Fiber& fiber = block->current();
    if (!(mask >> lane() & 1)) block->error = "a warp intrinsic whose mask does not name the lane that calls it";
    fiber.mask = mask;
    fiber.given = value;
    suspend(State::IN_WARP);
    return fiber.received;
}

unsigned lane() { return block->running % WARP; }

// The blocks' threads are started one after the other but joined only at the end, and the flags between them are
// invisible to ThreadSanitizer: to it no block happens before another. Nor do fibers retire before the end: their
// successors would inherit their identity, and races between equal threads of different blocks would look like none.
int run(const Launch& launch, void (*body)(void*), void* arguments, char* error, size_t error_bytes) {
    if (launch.grid == 0 || launch.block == 0 || launch.block > MAX_BLOCK || launch.shared_bytes > MAX_SHARED) {
        std::snprintf(error, error_bytes, "invalid configuration: grid %u, block %u, %u bytes of shared memory",
                      launch.grid, launch.block, launch.shared_bytes);
        return 1;
    }
    std::vector<unsigned> order = numbers(launch.grid);
    if (launch.seed != 0) Random{launch.seed * 0x9E3779B97F4A7C15ull}.shuffle(order);
    std::atomic<unsigned> done{0};
    std::atomic<bool> all_done{false};
    std::vector<std::thread> threads;
    int failed = 0;
    for (unsigned position = 0; position < launch.grid && !failed; ++position) {
        threads.emplace_back([&, index = order[position]] {
            std::vector<sanitizers::Fiber> retired;
            const std::string problem = run_block(launch, index, body, arguments, retired);
            if (!problem.empty()) std::snprintf(error, error_bytes, "block %u: %s", index, problem.c_str());
            failed = !problem.empty();
            done = done + 1;
            done.notify_all();
            all_done.wait(false);
            for (sanitizers::Fiber& fiber : retired) sanitizers::finish(fiber);
        });
        done.wait(position);
    }
    all_done = true;
    all_done.notify_all();
    for (std::thread& thread : threads) thread.join();
    return failed;
}

}  // namespace fibers

// Device memory: as strictly aligned as CUDA's, exactly as long as asked for, and full of garbage.
extern "C" void* fibers_allocate(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes) != 0) return nullptr;
    return std::memset(memory, fibers::GARBAGE, bytes);
}

extern "C" void fibers_free(void* memory) { std::free(memory); }
