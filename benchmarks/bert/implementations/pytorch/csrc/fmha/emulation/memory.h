/* The shared memory of a block, with a check of every access.

Each word records its last writer and reader, with source line and barrier interval. Reported are: two threads that
access a word without a barrier in between, at least one of them writing; accesses out of bounds or misaligned; reads of
unwritten words; and accesses to words that an asynchronous copy may still write, because copies arrive only when their
thread waits for them. A warp's collective load counts as a read by many threads. */
#ifndef MLBERT_FMHA_EMULATION_MEMORY_H
#define MLBERT_FMHA_EMULATION_MEMORY_H

#include "threads.h"

namespace emulation {

constexpr uint32_t FIRST_ADDRESS = 1024; /* shared memory does not start at 0 */
constexpr int NOBODY = -1, MANY = -2;

struct Access {
    int thread = NOBODY, epoch = 0;
    Place place{"", 0};
};

struct Word {
    Access written, read;
    Access copied; /* the pending copy, if any */
};

inline std::vector<unsigned char> memory;
inline std::vector<Word> words;

inline void new_memory(int bytes) {
    memory.assign(bytes, 0xFF); /* NaN in every type */
    words.assign(bytes / 4, Word());
}

inline unsigned char *byte_at(uint32_t address) { return &memory[address - FIRST_ADDRESS]; }

/* The words of an access; none if it is outside this block's memory. */
inline std::pair<Word *, Word *> words_at(uint32_t address, int bytes, Place place) {
    const int64_t first = static_cast<int64_t>(address) - FIRST_ADDRESS;
    if (first < 0 || first + bytes > static_cast<int64_t>(memory.size())) {
        report("behind the end of shared memory at " + place.text());
        return {nullptr, nullptr};
    }
    if (first % bytes) report("not aligned at " + place.text());
    return {&words[first / 4], &words[(first + bytes) / 4]};
}

/* Return whether another thread made this access since the last barrier. */
inline bool clashes(const Access &access, int thread) {
    return access.thread != NOBODY && access.epoch == block.epoch && (access.thread != thread || thread == MANY);
}

inline void clash(const char *what, Place place, const Access &other) {
    report(std::string(what) + " at " + place.text() + " without a barrier behind " + other.place.text());
}

inline void check_copy(const Word &word, Place place) {
    if (word.copied.thread == NOBODY) return;
    report("touched at " + place.text() + " while the copy of " + word.copied.place.text() + " is under way");
}

inline bool note_read(uint32_t address, int bytes, int thread, Place place) {
    const auto [first, last] = words_at(address, bytes, place);
    for (Word *word = first; word != last; word++) {
        check_copy(*word, place);
        if (word->written.thread == NOBODY) report("read at " + place.text() + " though nobody has written it");
        if (clashes(word->written, thread)) clash("read", place, word->written);
        Access &read = word->read;
        const bool alone = read.thread == NOBODY || read.epoch != block.epoch || read.thread == thread;
        read = {alone ? thread : MANY, block.epoch, place};
    }
    return first != nullptr;
}

inline bool note_write(uint32_t address, int bytes, int thread, Place place) {
    const auto [first, last] = words_at(address, bytes, place);
    for (Word *word = first; word != last; word++) {
        check_copy(*word, place);
        if (clashes(word->written, thread)) clash("written", place, word->written);
        if (clashes(word->read, thread)) clash("written", place, word->read);
        word->written = {thread, block.epoch, place};
    }
    return first != nullptr;
}

template <class Value> Value load(uint32_t address, Place place) {
    Value value{};
    if (note_read(address, sizeof value, block.current, place)) memcpy(&value, byte_at(address), sizeof value);
    return value;
}

template <class Value> void store(uint32_t address, Value value, Place place) {
    if (note_write(address, sizeof value, block.current, place)) memcpy(byte_at(address), &value, sizeof value);
}

constexpr int COPY_BYTES = 16;

inline void start_copy(uint32_t to, const void *from, Place place) {
    if (reinterpret_cast<uintptr_t>(from) % COPY_BYTES) report("copy from no multiple of 16 bytes at " + place.text());
    if (!note_write(to, COPY_BYTES, block.current, place)) return;
    me().copies.push_back({to, from, place});
    const auto [first, last] = words_at(to, COPY_BYTES, place);
    for (Word *word = first; word != last; word++) word->copied = {block.current, block.epoch, place};
}

/* Complete the copies of this thread. */
inline void finish_copies(Place place) {
    if (place == skipped) return;
    for (const Copy &copy : me().copies) {
        const auto [first, last] = words_at(copy.to, COPY_BYTES, copy.place);
        for (Word *word = first; word != last; word++) {
            word->copied = Access();
            word->written = {block.current, block.epoch, copy.place};
        }
        copy.from ? memcpy(byte_at(copy.to), copy.from, COPY_BYTES) : memset(byte_at(copy.to), 0, COPY_BYTES);
    }
    me().copies.clear();
}

} // namespace emulation

#endif
