/* Run the threads of a block as fibers on one CPU thread. They switch only when they wait for each other, so runs are
deterministic. Cases that would hang or be undefined on a GPU are reported: barriers that not all threads reach, and
warp instructions that the lanes do not execute together. */
#ifndef MLBERT_FMHA_EMULATION_THREADS_H
#define MLBERT_FMHA_EMULATION_THREADS_H

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ucontext.h>

namespace emulation {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

/* A source location. As a default argument it is the caller's. */
struct Place {
    const char *file;
    int line;
    static Place here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
    bool operator==(const Place &other) const { return line == other.line && !strcmp(file, other.file); }
    std::string text() const {
        const char *name = strrchr(file, '/');
        return std::string(name ? name + 1 : file) + ":" + std::to_string(line);
    }
};

inline std::set<std::string> reports; /* each reported once */
inline Place skipped{"", 0};          /* a barrier or wait that tests skip */

inline void report(const std::string &text) { reports.insert(text); }

struct Copy {
    uint32_t to;
    const void *from; /* null for zeros */
    Place place;
};

struct Thread {
    enum State { READY, AT_BARRIER, IN_WARP, DONE };
    State state = READY;
    Place place{"", 0};       /* where it waits */
    std::vector<Copy> copies; /* started but not waited for */
    uint32_t given[10] = {}, taken[4] = {}; /* of a warp instruction */
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    ucontext_t context;
};

using Instruction = void (*)(Thread *lanes);

struct Warp {
    int arrived = 0;
    Instruction instruction = nullptr;
    Place place{"", 0};
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::function<void()> kernel;
    ucontext_t outside;
    int current = 0, at_barrier = 0, done = 0, epoch = 0;
    bool failed = false;
};

inline Block block;

struct Index {
    unsigned x;
};

inline Index block_index{0};
inline Index thread_index() { return {static_cast<unsigned>(block.current)}; }
inline Thread &me() { return block.threads[block.current]; }

inline void leave() {
    block.failed = block.done != static_cast<int>(block.threads.size());
    setcontext(&block.outside);
}

/* Switch to the next thread that is not waiting, or leave the block if there is none. */
inline void next_thread() {
    const int count = block.threads.size(), before = block.current;
    for (int i = 1; i <= count; i++) {
        const int next = (before + i) % count;
        if (block.threads[next].state != Thread::READY) continue;
        if (next == before) return;
        block.current = next;
        swapcontext(&block.threads[before].context, &block.threads[next].context);
        return;
    }
    for (const Thread &thread : block.threads) {
        if (thread.state != Thread::DONE) report("threads wait for ever at " + thread.place.text());
    }
    leave();
}

inline void barrier(Place place) {
    if (place == skipped) return;
    Thread &thread = me();
    thread.state = Thread::AT_BARRIER, thread.place = place;
    if (++block.at_barrier < static_cast<int>(block.threads.size())) return next_thread();
    for (Thread &other : block.threads) {
        if (!(other.place == place)) report("one barrier at " + place.text() + " and " + other.place.text());
        other.state = Thread::READY;
    }
    block.at_barrier = 0;
    block.epoch++;
}

/* A warp instruction: once all lanes have set `given`, `instruction` sets `taken` for all of them. */
inline void together(Instruction instruction, Place place) {
    Warp &warp = block.warps[block.current / LANES];
    if (warp.arrived++ == 0) warp.instruction = instruction, warp.place = place;
    if (warp.instruction != instruction || !(warp.place == place)) {
        report("a warp is at " + place.text() + " and " + warp.place.text() + " at once");
    }
    Thread &thread = me();
    thread.state = Thread::IN_WARP, thread.place = place;
    if (warp.arrived < LANES) return next_thread();
    Thread *lanes = &block.threads[block.current / LANES * LANES];
    instruction(lanes);
    for (int i = 0; i < LANES; i++) lanes[i].state = Thread::READY;
    warp.arrived = 0;
}

inline void thread_main() {
    block.kernel();
    for (const Copy &copy : me().copies) report("nobody waits for the copy of " + copy.place.text());
    me().state = Thread::DONE;
    block.done++;
    next_thread();
}

/* Run one block of a kernel; return false if it did not finish. */
inline bool run_block(int index, int threads, const std::function<void()> &kernel) {
    if (static_cast<int>(block.threads.size()) != threads) block.threads = std::vector<Thread>(threads);
    block.warps.assign(threads / LANES, Warp());
    block.kernel = kernel;
    block.current = block.at_barrier = block.done = block.epoch = 0;
    block_index = {static_cast<unsigned>(index)};
    for (Thread &thread : block.threads) {
        thread.state = Thread::READY;
        thread.copies.clear();
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&thread.context, thread_main, 0);
    }
    swapcontext(&block.outside, &block.threads[0].context);
    return !block.failed;
}

} // namespace emulation

#endif
