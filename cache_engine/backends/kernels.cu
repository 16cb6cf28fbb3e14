// The embedding cache's batch algorithm on a GPU: one thread per key, per unique miss or per piece of a row.
//
// The definition is cache_engine/backends/cpu/embedding.py: state, outputs and counters are the same bit for bit, in
// whatever order threads run. cache_engine/backends/cuda.py launches the kernels in this order for a batch of n keys:
//
//   begin_batch      clears the scratch; counts the batch
//   probe            stamps hits; enters misses into a hash table of positions, where the least position of a key wins
//   mark_first, sum_bits, base_bits, number_misses
//                    number the unique misses by their first position; rank them within their index sets
//   claim_entries    chooses an entry for each, by its rank and the state before the batch
//   sum_bits, base_bits, admit
//                    erase entries that are taken over; hand out slots that were never filled
//   take_windows     (LRU) victims for the rest, each from its own window behind the hand
//   sieve_examine, sum_bits, base_bits, sieve_take, sieve_close
//                    (SIEVE) victims for the rest from the next entries of the queues; again while they are too few
//   sieve_place      (SIEVE) gives them to the misses, and enters newcomers into the queue
//   deliver          slots of all keys, counters, the hand
//   store_rows_*     (payload) copies the rows that were fetched
//   publish          lets the index tell of them
//   gather_rows_*    (payload) copies all rows to the caller
//
// No kernel needs its threads to meet: whatever a thread must know of the others was written by an earlier launch. Inside
// one launch, memory that several threads touch is only ever accessed by atomics, or by loads and stores that bypass the
// first-level cache (__ldcg, __stcg), and what it holds in the end does not depend on their order.
//
// Nothing is included, so that the same text goes through NVRTC, nvcc and, behind a header that stands in for the
// language's built-ins, a host compiler.

// Blocks of 256 threads. At least two at once on a multiprocessor: left to itself, the compiler spills to have eight.
#define KERNEL extern "C" __global__ void __launch_bounds__(256, 2)

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int SIEVE = 1;  // policy

constexpr int WAYS = 12;
constexpr int WINDOW = 8;
constexpr int EMPTY = -1;
constexpr int RESERVED = -2;  // of an entry: claimed in this batch, not yet published
constexpr int NO_MISS = 0x7fffffff;
constexpr int LINE_BYTES = 64;  // of the index: WAYS tags of a byte, four bytes of nothing, WAYS slots
constexpr int LINE_INTS = 16;
constexpr int FIRST_SLOT = 4;  // of a line's integers
constexpr int GROUP = 32;  // words that share a base in the numbering of set bits

// EmbeddingState.scalars
constexpr int NOW = 0;
constexpr int HAND = 1;
constexpr int N_FRESH = 2;
constexpr int SETS = 3;
constexpr int ROWS_PER_PAGE = 4;
constexpr int POLICY = 7;
constexpr int AHEAD = 8;
constexpr int ROOM = 9;
constexpr int FIRST = 10;  // START there: [2]
constexpr int COUNT = 12;  // [2]
constexpr int QUEUED = 14;  // [2]

// EmbeddingState.counters
constexpr int REQUESTED = 0;
constexpr int HITS = 1;
constexpr int MISSES = 2;
constexpr int FETCHED = 3;
constexpr int BYPASSED = 4;
constexpr int EVICTED = 5;

// Totals of the batch, in scratch
constexpr int UNIQUE = 0;   // unique misses
constexpr int WAITING = 1;  // of them, those that took an empty entry and need a slot
constexpr int UNFILLED = 2; // slots never filled; counted no further than the batch can use
constexpr int SLOTS = 3;    // slots of all pages owned
constexpr int WINDOWS = 4;
constexpr int START = 5;    // the hand, before the batch
constexpr int FOUND = 6;    // victims of SIEVE so far
constexpr int REMAINING = 7; // entries of the queues not examined yet
constexpr int VICTIMS = 8;  // of the entries examined in this round
// 9: those that would survive; nothing reads it
constexpr int CUT = 10;     // entries up to the last victim needed, if there are so many
constexpr int TAKEN = 11;   // [2] victims that stood ahead, and that the hand had passed
constexpr int SURVIVED = 13; // [2]

__device__ __forceinline__ i64 thread_number() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014); cache_engine/hashing.py.
__device__ __forceinline__ u64 mix(u64 x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u64 hash_key(short table, i64 key) {
    return mix(mix((u64)(i64)table) ^ ((u64)key * 0x9E3779B97F4A7C15ull));
}

// First integer of the index line of a hash: a multiplication instead of a division (Lemire 2019).
__device__ __forceinline__ int line_of(u64 bits, i64 sets) { return (int)(((bits >> 32) * (u64)sets) >> 32) * LINE_INTS; }

__device__ __forceinline__ u32 tag_of(u64 bits) { return bits & 255 ? (u32)(bits & 255) : 1; }

// A row's record is its key, then this word: the batch of its last use, the table, whether visited, whether live.
constexpr u64 VISITED = 1ull << 48;
constexpr u64 LIVE = 1ull << 56;
__device__ __forceinline__ u64 word_of(i64 now, short table) { return (u64)(u32)(u64)now | (u64)(unsigned short)table << 32; }
__device__ __forceinline__ short table_of(u64 word) { return (short)(word >> 32); }

__device__ __forceinline__ void count(i64* counter, i64 n) { atomicAdd((u64*)counter, (u64)n); }

// Batches since the slot was used; 0 if it is not evictable. Differences modulo 2**32 survive the counter's wrap.
__device__ __forceinline__ u32 age(const u64* rows, const int* pins, const u8* draining, int slot, int page, u32 now) {
    u32 batches = now - (u32)rows[2 * (i64)slot + 1];
    return batches > 0 && pins[page] == 0 && draining[page] == 0 ? batches : 0;
}

__device__ __forceinline__ void set_tag(int* index, int e, u32 tag) {
    __stcg((u8*)index + (i64)(e / LINE_INTS) * LINE_BYTES + e % LINE_INTS - FIRST_SLOT, (u8)tag);
}

__device__ __forceinline__ void erase(int* index, int e) {
    __stcg(&index[e], EMPTY);
    set_tag(index, e, 0);
}

// The entry of a key, or EMPTY. Other threads may stamp rows meanwhile.
__device__ __forceinline__ int find(const int* index, const u64* rows, int line, u32 tag, short table, i64 key) {
    for (int w = 0; w < WAYS; w++) {
        if (((u32)index[line + w / 4] >> (8 * (w % 4)) & 255) != tag) continue;
        int e = line + FIRST_SLOT + w;
        i64 slot = index[e];
        if (slot >= 0 && (i64)rows[2 * slot] == key && table_of(__ldcg(&rows[2 * slot + 1])) == table) return e;
    }
    return EMPTY;
}

// The entry that tells of a live slot; other threads may erase other entries meanwhile.
__device__ __forceinline__ int entry_of(const int* index, const u64* rows, int slot, i64 sets) {
    i64 at = 2 * (i64)slot;
    int e = line_of(hash_key(table_of(rows[at + 1]), (i64)rows[at]), sets) + FIRST_SLOT;
    while (__ldcg(&index[e]) != slot) e++;
    return e;
}

// Set bits before bit i. `bases` holds those before each group of words.
__device__ __forceinline__ int bits_before(const u32* bits, const int* bases, i64 i) {
    i64 word = i / 32;
    int before = bases[word / GROUP];
    for (i64 w = word / GROUP * GROUP; w < word; w++) before += __popc(bits[w]);
    return before + __popc(bits[word] & ((1u << (i % 32)) - 1u));
}

// Take a row out of the index, and make its slot older than any live one.
__device__ __forceinline__ void forget(int* index, u64* rows, int e, int slot, i64 now) {
    i64 at = 2 * (i64)slot + 1;
    erase(index, e);
    __stcg(&rows[at], word_of(now + 0x80000000ll, table_of(__ldcg(&rows[at]))));
}

// Where the j-th entry from the hand on stands: first those ahead of it, then those that it has passed.
__device__ __forceinline__ i64 queue_place(const i64* scalars, i64 j) {
    i64 which = scalars[AHEAD];
    if (j >= scalars[COUNT + which]) {
        j -= scalars[COUNT + which];
        which = 1 - which;
    }
    return which * scalars[ROOM] + (scalars[FIRST + which] + j) % scalars[ROOM];
}

// Where the k-th slot comes to stand that is entered at the end of a queue.
__device__ __forceinline__ i64 queue_end(const i64* scalars, i64 which, i64 k) {
    return which * scalars[ROOM] + (scalars[FIRST + which] + scalars[COUNT + which] + k) % scalars[ROOM];
}

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }

// Victims that SIEVE has still to find for the batch.
__device__ __forceinline__ i64 needed(const i64* totals) {
    return totals[WAITING] - least(totals[WAITING], totals[UNFILLED]) - totals[FOUND];
}

// One thread per place of the hash tables; places >= 2 n, a power of two, and 32 places >= chunk.
KERNEL begin_batch(i64* scalars, const int* fill, const int* fresh, i64* totals, int* seen, int* group_set,
                   int* group_top, u32* first_bits, u32* waiting_bits, u32* victim_bits, u32* survivor_bits, i64 chunk,
                   i64 owned_pages, i64 n, i64 places) {
    i64 t = thread_number();
    if (t < places) {
        seen[t] = EMPTY;
        group_set[t] = EMPTY;
        for (int k = 0; k < WAYS; k++) group_top[t * WAYS + k] = NO_MISS;
    }
    if (t * 32 < n) {
        first_bits[t] = 0;
        waiting_bits[t] = 0;
    }
    if (t * 32 < chunk) {
        victim_bits[t] = 0;
        survivor_bits[t] = 0;
    }
    if (t > 0) return;
    i64 rows_per_page = scalars[ROWS_PER_PAGE];
    i64 slots = owned_pages * rows_per_page;
    i64 unfilled = 0;
    for (i64 k = scalars[N_FRESH] - 1; k >= 0 && unfilled < n; k--) unfilled += rows_per_page - fill[fresh[k]];
    scalars[NOW] += 1;
    totals[UNIQUE] = 0;
    totals[WAITING] = 0;
    totals[UNFILLED] = unfilled;
    totals[SLOTS] = slots;
    totals[WINDOWS] = slots >= WINDOW ? slots / WINDOW : (slots > 0 ? 1 : 0);
    totals[START] = scalars[HAND] < slots ? scalars[HAND] : 0;
    totals[FOUND] = 0;
    totals[REMAINING] = scalars[COUNT] + scalars[COUNT + 1];
    for (int k = 0; k < 2; k++) totals[TAKEN + k] = totals[SURVIVED + k] = 0;
}

// One thread per key. A miss leaves its place in the table of positions in `cell`, a hit -1.
KERNEL probe(const int* index, u64* rows, const i64* scalars, const short* tables, const i64* keys, int* slots, int* miss,
             int* cell, int* seen, i64 n, i64 places) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 key = keys[i];
    short table = tables[i];
    u64 bits = hash_key(table, key);
    int e = find(index, rows, line_of(bits, scalars[SETS]), tag_of(bits), table, key);
    int found = e >= 0 ? index[e] : EMPTY;
    slots[i] = found;
    miss[i] = EMPTY;
    cell[i] = EMPTY;
    if (found >= 0) {
        __stcg(&rows[2 * (i64)found + 1], word_of(scalars[NOW], table) | VISITED | LIVE);
        return;
    }
    i64 at = (i64)(bits & (u64)(places - 1));
    for (;;) {
        // A place changes its key never again, only the position at which that key stands.
        int j = __ldcg(&seen[at]);
        if (j == EMPTY) {
            j = atomicCAS(&seen[at], EMPTY, (int)i);
            if (j == EMPTY) break;
        }
        if (keys[j] == key && tables[j] == table) {
            if (i < j) atomicMin(&seen[at], (int)i);
            break;
        }
        at = (at + 1) & (places - 1);
    }
    cell[i] = (int)at;
}

// One thread per key: bit i is set where key i is the first of its kind among the misses.
KERNEL mark_first(const int* cell, const int* seen, u32* bits, i64 n) {
    i64 i = thread_number();
    if (i < n && cell[i] >= 0 && seen[cell[i]] == i) atomicOr(&bits[i / 32], 1u << (i % 32));
}

// Numbering set bits takes two launches without a block's barrier: sums of groups of 1,024 bits, then the sums before
// each group; a thread that asks for its rank adds up at most 31 words of its group. A batch of 64k keys has 64 groups,
// so that no thread of base_bits adds more than 63 sums; its work grows with the square of n / 1024, and is less than
// the probes' up to some 10M keys.
KERNEL sum_bits(const u32* bits, int* sums, i64 n) {
    i64 group = thread_number();
    i64 words = (n + 31) / 32;
    if (group * GROUP >= words) return;
    int sum = 0;
    for (i64 w = group * GROUP; w < (group + 1) * GROUP && w < words; w++) sum += __popc(bits[w]);
    sums[group] = sum;
}

// One thread per group; the last one writes the number of all set bits.
KERNEL base_bits(const int* sums, int* bases, i64* totals, i64 which, i64 groups) {
    i64 group = thread_number();
    if (group >= groups) return;
    int before = 0;
    for (i64 g = 0; g < group; g++) before += sums[g];
    bases[group] = before;
    if (group == groups - 1) totals[which] = before + sums[group];
}

// One thread per key. The first of each kind also enters its number among the WAYS least of its index set, which are
// all that the set can admit: each level of `group_top` keeps the least number that has reached it and passes the
// others on, so that the outcome is sorted whatever the order of arrival.
KERNEL number_misses(const short* tables, const i64* keys, const i64* scalars, const int* cell, const int* seen,
                     const u32* bits, const int* bases, int* miss, int* first, int* place, int* group, int* group_set,
                     int* group_top, i64 n, i64 places) {
    i64 i = thread_number();
    if (i >= n || cell[i] < 0) return;
    int origin = seen[cell[i]];
    int r = bits_before(bits, bases, origin);
    miss[i] = r;
    if (origin != i) return;
    first[r] = origin;
    int base = line_of(hash_key(tables[i], keys[i]), scalars[SETS]);
    place[r] = base;
    i64 at = (base / LINE_INTS) & (places - 1);
    for (;;) {
        int other = __ldcg(&group_set[at]);
        if (other == EMPTY) {
            other = atomicCAS(&group_set[at], EMPTY, base);
            if (other == EMPTY) break;
        }
        if (other == base) break;
        at = (at + 1) & (places - 1);
    }
    group[r] = (int)at;
    int* top = group_top + at * WAYS;
    if (__ldcg(&top[WAYS - 1]) < r) return;
    int arriving = r;
    for (int k = 0; k < WAYS; k++) {
        int least = atomicMin(&top[k], arriving);
        if (least == NO_MISS) break;
        arriving = least > arriving ? least : arriving;
    }
}

// The more, the sooner the slot's row goes from a full set; 0 if it is not evictable.
__device__ __forceinline__ u64 order_of(const u64* rows, const int* pins, const u8* draining, const int* spot,
                                        const i64* scalars, int slot) {
    u64 word = rows[2 * (i64)slot + 1];
    u32 a = (u32)scalars[NOW] - (u32)word;
    int page = slot / (int)scalars[ROWS_PER_PAGE];
    if (a == 0 || pins[page] > 0 || draining[page]) return 0;
    if (scalars[POLICY] != SIEVE) return (u64)a << 32 | (u32)~slot;
    int room = (int)scalars[ROOM];
    int ahead = (int)scalars[AHEAD];
    int which = spot[slot] >= room;
    int distance = spot[slot] - which * room - (int)scalars[FIRST + which];
    if (distance < 0) distance += room;
    if (which != ahead) distance += (int)scalars[COUNT + ahead];
    return (word & VISITED ? 0 : 1ull << 32) | (u32)~distance;
}

// One thread per unique miss. The k-th miss of an index set takes the set's k-th empty entry; when those are used up, the
// evictable entry that goes first of those that the misses before it left. It only chooses: the index stays as it was.
KERNEL claim_entries(const int* index, const u64* rows, const int* pins, const u8* draining, const i64* scalars,
                     const int* spot, const i64* totals, const int* group, const int* group_top, int* place,
                     int* miss_slot, u32* waiting_bits) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE]) return;
    int base = place[r] + FIRST_SLOT;
    place[r] = EMPTY;
    miss_slot[r] = EMPTY;
    const int* top = group_top + (i64)group[r] * WAYS;
    int rank = 0;
    while (rank < WAYS && top[rank] != r) rank++;
    if (rank == WAYS) return;
    int empties = 0;
    for (int e = base; e < base + WAYS; e++) {
        if (index[e] != EMPTY) continue;
        if (empties == rank) {
            place[r] = e;
            atomicOr(&waiting_bits[r / 32], 1u << (r % 32));
            return;
        }
        empties++;
    }
    u64 chosen = ~0ull;
    int entry = EMPTY;
    for (int k = empties; k <= rank; k++) {
        u64 next = 0;
        for (int e = base; e < base + WAYS; e++) {
            int slot = index[e];
            if (slot < 0) continue;
            u64 order = order_of(rows, pins, draining, spot, scalars, slot);
            if (order < chosen && order > next) {
                next = order;
                entry = e;
            }
        }
        if (next == 0) return;
        chosen = next;
    }
    place[r] = entry;
    miss_slot[r] = index[entry];
}

// One thread per unique miss. The j-th miss that waits for a slot takes the j-th slot never filled, if there are so many.
// It walks the stack of pages to get there: j / rows_per_page steps, more only where a page was handed out in part.
KERNEL admit(int* index, u64* rows, const int* fill, const int* fresh, i64* counters, const i64* scalars,
             const i64* totals, const short* tables, const i64* keys, const int* first, const int* place, int* miss_slot,
             const u32* waiting_bits, const int* bases) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE] || place[r] < 0) return;
    int e = place[r];
    int slot = miss_slot[r];
    i64 key = keys[first[r]];
    short table = tables[first[r]];
    index[e] = RESERVED;
    set_tag(index, e, tag_of(hash_key(table, key)));
    if (slot >= 0) {
        count(&counters[EVICTED], 1);
    } else {
        int left = bits_before(waiting_bits, bases, r);
        if (left >= totals[UNFILLED]) return;
        int rows_per_page = (int)scalars[ROWS_PER_PAGE];
        for (i64 k = scalars[N_FRESH] - 1; slot < 0; k--) {
            int page = fresh[k];
            int room = rows_per_page - fill[page];
            if (left < room) slot = page * rows_per_page + fill[page] + left;
            left -= room;
        }
        miss_slot[r] = slot;
    }
    rows[2 * (i64)slot] = (u64)key;
    rows[2 * (i64)slot + 1] = word_of(scalars[NOW], table);
}

// One thread per unique miss; those that still wait take the oldest evictable slot of their window. Windows are disjoint,
// and so are their slots' entries. What this launch writes in `rows` no other thread of it reads.
KERNEL take_windows(int* index, u64* rows, const int* pins, const u8* draining, const int* lists, i64* counters,
                    const i64* scalars, const i64* totals, const short* tables, const i64* keys, const int* first,
                    const int* place, int* miss_slot, const u32* waiting_bits, const int* bases) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE] || place[r] < 0 || miss_slot[r] >= 0) return;
    i64 window = bits_before(waiting_bits, bases, r) - totals[UNFILLED];
    if (window >= totals[WINDOWS]) return;
    int rows_per_page = (int)scalars[ROWS_PER_PAGE];
    u32 now = (u32)scalars[NOW];
    i64 total = totals[SLOTS];
    i64 position = (totals[START] + window * WINDOW) % total;
    i64 at_page = position / rows_per_page;
    int at_row = (int)(position % rows_per_page);
    int slot = EMPTY;
    u32 oldest = 0;
    for (int k = 0; k < WINDOW; k++) {
        int page = lists[at_page];
        int candidate = page * rows_per_page + at_row;
        u32 a = age(rows, pins, draining, candidate, page, now);
        if (a > oldest || (a > 0 && a == oldest && candidate < slot)) {
            slot = candidate;
            oldest = a;
        }
        if (++at_row == rows_per_page) {
            at_row = 0;
            if (++at_page * rows_per_page == total) at_page = 0;
        }
    }
    if (slot < 0) return;
    if (rows[2 * (i64)slot + 1] & LIVE) {
        erase(index, entry_of(index, rows, slot, scalars[SETS]));
        count(&counters[EVICTED], 1);
    }
    rows[2 * (i64)slot] = (u64)keys[first[r]];
    rows[2 * (i64)slot + 1] = word_of(now, tables[first[r]]);
    miss_slot[r] = slot;
}

// SIEVE goes through the entries of its queues in rounds of at most `chunk`. One thread per entry: whether it would be a
// victim or survive, if the hand comes so far. Entries whose slot stands elsewhere by now are neither.
KERNEL sieve_examine(const u64* rows, const int* pins, const u8* draining, const int* queue, const int* spot,
                     const i64* scalars, const i64* totals, u32* victim_bits, u32* survivor_bits, i64 chunk) {
    i64 j = thread_number();
    if (j >= least(chunk, totals[REMAINING])) return;
    i64 at = queue_place(scalars, j);
    int slot = queue[at];
    if (spot[slot] != at) return;
    u64 word = rows[2 * (i64)slot + 1];
    int page = slot / (int)scalars[ROWS_PER_PAGE];
    bool survives = (word & VISITED) || (u32)word == (u32)scalars[NOW] || pins[page] > 0 || draining[page];
    atomicOr(survives ? &survivor_bits[j / 32] : &victim_bits[j / 32], 1u << (j % 32));
}

// One thread per entry, as far as victims are needed: they leave the index, survivors go to the end of the other queue.
// Ends of queues lie apart from what is examined, and every slot has one thread.
KERNEL sieve_take(int* index, u64* rows, int* queue, int* spot, i64* counters, const i64* scalars, i64* totals,
                  int* victims, const u32* victim_bits, const int* victim_bases, const u32* survivor_bits,
                  const int* survivor_bases, i64 chunk) {
    i64 j = thread_number();
    i64 examined = least(chunk, totals[REMAINING]);
    if (j >= examined) return;
    i64 need = needed(totals);
    i64 before = bits_before(victim_bits, victim_bases, j);
    if (before >= need) return;
    i64 ahead = scalars[AHEAD];
    i64 n_ahead = scalars[COUNT + ahead];
    int passed = j >= n_ahead;
    int slot = queue[queue_place(scalars, j)];
    if (victim_bits[j / 32] >> (j % 32) & 1) {
        if (rows[2 * (i64)slot + 1] & LIVE) {
            erase(index, entry_of(index, rows, slot, scalars[SETS]));
            count(&counters[EVICTED], 1);
        }
        victims[totals[FOUND] + before] = slot;
        if (before == need - 1) totals[CUT] = j + 1;
        count(&totals[TAKEN + passed], 1);
    } else if (survivor_bits[j / 32] >> (j % 32) & 1) {
        i64 rank = bits_before(survivor_bits, survivor_bases, j);
        if (passed) rank -= bits_before(survivor_bits, survivor_bases, n_ahead);
        i64 at = queue_end(scalars, passed ? ahead : 1 - ahead, rank);
        queue[at] = slot;
        spot[slot] = (int)at;
        rows[2 * (i64)slot + 1] &= ~VISITED;
        count(&totals[SURVIVED + passed], 1);
    }
}

// One thread per 32 entries, at least one. Thread 0 ends the round: it moves the hand, and the queues change places when
// nothing is ahead.
KERNEL sieve_close(i64* scalars, i64* totals, u32* victim_bits, u32* survivor_bits, i64 chunk) {
    i64 t = thread_number();
    if (t * 32 < chunk) {
        victim_bits[t] = 0;
        survivor_bits[t] = 0;
    }
    if (t > 0) return;
    i64 need = needed(totals);
    i64 cut = need == 0 ? 0 : (totals[VICTIMS] >= need ? totals[CUT] : least(chunk, totals[REMAINING]));
    i64 ahead = scalars[AHEAD];
    i64 room = scalars[ROOM];
    i64 n_ahead = scalars[COUNT + ahead];
    for (int passed = 0; passed < 2; passed++) {
        i64 which = passed ? 1 - ahead : ahead;
        i64 gone = passed ? cut - least(cut, n_ahead) : least(cut, n_ahead);
        i64 stayed = totals[SURVIVED + passed];
        if (gone > 0) scalars[FIRST + which] = (scalars[FIRST + which] + gone) % room;
        scalars[COUNT + which] -= gone;
        scalars[QUEUED + which] -= totals[TAKEN + passed] + stayed;
        scalars[COUNT + 1 - which] += stayed;
        scalars[QUEUED + 1 - which] += stayed;
        totals[FOUND] += totals[TAKEN + passed];
        totals[TAKEN + passed] = totals[SURVIVED + passed] = 0;
    }
    totals[REMAINING] -= cut;
    if (cut > n_ahead) ahead = 1 - ahead;
    if (scalars[QUEUED + ahead] == 0) {
        i64 stale = scalars[COUNT + ahead];
        if (stale > 0) scalars[FIRST + ahead] = (scalars[FIRST + ahead] + stale) % room;
        scalars[COUNT + ahead] = 0;
        totals[REMAINING] -= stale;
        ahead = 1 - ahead;
    }
    scalars[AHEAD] = ahead;
}

// One thread per unique miss: those that wait take the victims in order. All that have a slot enter the queue ahead.
KERNEL sieve_place(u64* rows, int* queue, int* spot, const i64* scalars, const i64* totals, const short* tables,
                   const i64* keys, const int* first, int* miss_slot, const int* victims, const u32* waiting_bits,
                   const int* bases) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE] || !(waiting_bits[r / 32] >> (r % 32) & 1)) return;
    i64 w = bits_before(waiting_bits, bases, r);
    i64 victim = w - least(totals[WAITING], totals[UNFILLED]);
    if (victim >= totals[FOUND]) return;
    int slot = victim < 0 ? miss_slot[r] : victims[victim];
    miss_slot[r] = slot;
    rows[2 * (i64)slot] = (u64)keys[first[r]];
    rows[2 * (i64)slot + 1] = word_of(scalars[NOW], tables[first[r]]);
    i64 at = queue_end(scalars, scalars[AHEAD], w);
    queue[at] = slot;
    spot[slot] = (int)at;
}

// One thread per key, at least one: the slots of all keys, and the counters. Thread 0 also moves the hand and the stack.
KERNEL deliver(int* fill, const int* fresh, i64* scalars, i64* counters, const i64* totals, const int* miss,
               const int* miss_slot, int* slots, i64 n) {
    i64 i = thread_number();
    if (i < n) {
        int r = miss[i];
        if (r < 0) {
            count(&counters[HITS], 1);
        } else {
            slots[i] = miss_slot[r];
            count(&counters[MISSES], 1);
            if (miss_slot[r] < 0) count(&counters[BYPASSED], 1);
        }
    }
    if (i > 0) return;
    counters[REQUESTED] += n;
    counters[FETCHED] += totals[UNIQUE];
    i64 waiting = totals[WAITING];
    i64 filled = least(waiting, totals[UNFILLED]);
    if (scalars[POLICY] == SIEVE) {
        scalars[COUNT + scalars[AHEAD]] += filled + totals[FOUND];
        scalars[QUEUED + scalars[AHEAD]] += filled + totals[FOUND];
    } else {
        i64 windows = least(waiting - filled, totals[WINDOWS]);
        scalars[HAND] = totals[SLOTS] > 0 ? (totals[START] + windows * WINDOW) % totals[SLOTS] : 0;
    }
    i64 rows_per_page = scalars[ROWS_PER_PAGE];
    i64 stack = scalars[N_FRESH];
    while (filled > 0) {
        int page = fresh[stack - 1];
        i64 room = rows_per_page - fill[page];
        i64 taken = filled < room ? filled : room;
        fill[page] += (int)taken;
        filled -= taken;
        if (taken == room) stack--;
    }
    scalars[N_FRESH] = stack;
}

// One thread per unique miss, after its row was copied: the index tells of the slot, or the entry is free again.
KERNEL publish(int* index, u64* rows, const i64* totals, const int* place, const int* miss_slot) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE] || place[r] < 0) return;
    int slot = miss_slot[r];
    if (slot < 0) {
        erase(index, place[r]);
        return;
    }
    index[place[r]] = slot;
    rows[2 * (i64)slot + 1] |= LIVE;
}

// One thread per key: take back the last batch, whose rows did not come. Its victims stay evicted.
KERNEL retract(int* index, u64* rows, const i64* scalars, i64* counters, const int* miss, const int* first,
               const int* place, const int* miss_slot, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    count(&counters[REQUESTED], -1);
    int r = miss[i];
    if (r < 0) {
        count(&counters[HITS], -1);
        return;
    }
    int slot = miss_slot[r];
    count(&counters[MISSES], -1);
    if (slot < 0) count(&counters[BYPASSED], -1);
    if (first[r] != i) return;
    count(&counters[FETCHED], -1);
    if (slot >= 0) forget(index, rows, place[r], slot, scalars[NOW]);
}

// One thread per key. Of several copies of a key, the one that empties the entry counts it.
KERNEL invalidate(int* index, u64* rows, const i64* scalars, const short* tables, const i64* keys, i64* gone, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 key = keys[i];
    short table = tables[i];
    int base = line_of(hash_key(table, key), scalars[SETS]) + FIRST_SLOT;
    for (int e = base; e < base + WAYS; e++) {
        // Not by the tags: another thread may be erasing one of them.
        i64 slot = __ldcg(&index[e]);
        if (slot < 0 || (i64)rows[2 * slot] != key || table_of(__ldcg(&rows[2 * slot + 1])) != table) continue;
        if (atomicExch(&index[e], EMPTY) >= 0) {
            forget(index, rows, e, (int)slot, scalars[NOW]);
            count(gone, 1);
        }
        return;
    }
}

// One thread per key: whether it is cached.
KERNEL contains(const int* index, const u64* rows, const i64* scalars, const short* tables, const i64* keys, u8* found,
                i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    u64 bits = hash_key(tables[i], keys[i]);
    found[i] = find(index, rows, line_of(bits, scalars[SETS]), tag_of(bits), tables[i], keys[i]) >= 0;
}

// One thread per slot of the page that was handed out: erase its row from the index and its slot from the queues, before
// the slot can be anyone else's.
KERNEL unpublish_page(int* index, u64* rows, int* spot, i64* counters, i64* scalars, i64 page, i64 count_rows) {
    i64 t = thread_number();
    if (t >= count_rows) return;
    i64 slot = page * scalars[ROWS_PER_PAGE] + t;
    if (rows[2 * slot + 1] & LIVE) {
        erase(index, entry_of(index, rows, (int)slot, scalars[SETS]));
        rows[2 * slot + 1] &= ~(VISITED | LIVE);
        count(&counters[EVICTED], 1);
    }
    if (scalars[POLICY] == SIEVE && spot[slot] != EMPTY) {
        count(&scalars[QUEUED + (spot[slot] >= scalars[ROOM])], -1);
        spot[slot] = EMPTY;
    }
}

// One thread per slot asked for: the batch of its last use, by which the host chooses a page to give up.
KERNEL read_last(const u64* rows, const int* slots, u32* values, i64 n) {
    i64 i = thread_number();
    if (i < n) values[i] = (u32)rows[2 * (i64)slots[i] + 1];
}

// One thread per word of the records of consecutive slots, for the host.
KERNEL read_records(const u64* rows, i64 first, u64* out, i64 n) {
    i64 i = thread_number();
    if (i < n) out[i] = rows[first + i];
}

// Rows are copied in units of the widest type that divides them: one thread per unit, `units` a row, neighbours to
// neighbours. Slot s begins at (s / rows_per_page) * page_bytes + (s % rows_per_page) * row_bytes of the storage.
template <class Unit>
__device__ __forceinline__ Unit* unit_of(u8* storage, int slot, u32 unit, i64 page_bytes, int rows_per_page, u32 units) {
    i64 at = (i64)(slot / rows_per_page) * page_bytes + (i64)(slot % rows_per_page) * units * (i64)sizeof(Unit);
    return (Unit*)(storage + at) + unit;
}

template <class Unit>
__device__ __forceinline__ void store_unit(u8* storage, const u8* staged, const int* miss_slot, i64 page_bytes,
                                           i64 rows_per_page, i64 units, i64 rows) {
    i64 t = thread_number();
    if (t >= rows * units) return;
    u32 r = (u32)t / (u32)units;
    u32 unit = (u32)t % (u32)units;
    if (miss_slot[r] < 0) return;
    *unit_of<Unit>(storage, miss_slot[r], unit, page_bytes, (int)rows_per_page, (u32)units) = ((const Unit*)staged)[t];
}

template <class Unit>
__device__ __forceinline__ void gather_unit(u8* storage, const u8* staged, const int* slots, const int* miss, u8* out,
                                            i64 page_bytes, i64 rows_per_page, i64 units, i64 rows) {
    i64 t = thread_number();
    if (t >= rows * units) return;
    u32 i = (u32)t / (u32)units;
    u32 unit = (u32)t % (u32)units;
    ((Unit*)out)[t] = slots[i] >= 0
        ? *unit_of<Unit>(storage, slots[i], unit, page_bytes, (int)rows_per_page, (u32)units)
        : ((const Unit*)staged)[miss[i] * units + unit];
}

// rows[r] of the fetched ones into slot miss_slot[r]; a row without a slot is passed over. rows * units < 2**31.
KERNEL store_rows_16(u8* storage, const u8* staged, const int* miss_slot, i64 page_bytes, i64 rows_per_page, i64 units,
                     i64 rows) {
    store_unit<uint4>(storage, staged, miss_slot, page_bytes, rows_per_page, units, rows);
}
KERNEL store_rows_4(u8* storage, const u8* staged, const int* miss_slot, i64 page_bytes, i64 rows_per_page, i64 units,
                    i64 rows) {
    store_unit<u32>(storage, staged, miss_slot, page_bytes, rows_per_page, units, rows);
}
KERNEL store_rows_1(u8* storage, const u8* staged, const int* miss_slot, i64 page_bytes, i64 rows_per_page, i64 units,
                    i64 rows) {
    store_unit<u8>(storage, staged, miss_slot, page_bytes, rows_per_page, units, rows);
}

// Key i's row into out[i]: from its slot, or from staged[miss[i]] where it is served past the cache.
KERNEL gather_rows_16(u8* storage, const u8* staged, const int* slots, const int* miss, u8* out, i64 page_bytes,
                      i64 rows_per_page, i64 units, i64 rows) {
    gather_unit<uint4>(storage, staged, slots, miss, out, page_bytes, rows_per_page, units, rows);
}
KERNEL gather_rows_4(u8* storage, const u8* staged, const int* slots, const int* miss, u8* out, i64 page_bytes,
                     i64 rows_per_page, i64 units, i64 rows) {
    gather_unit<u32>(storage, staged, slots, miss, out, page_bytes, rows_per_page, units, rows);
}
KERNEL gather_rows_1(u8* storage, const u8* staged, const int* slots, const int* miss, u8* out, i64 page_bytes,
                     i64 rows_per_page, i64 units, i64 rows) {
    gather_unit<u8>(storage, staged, slots, miss, out, page_bytes, rows_per_page, units, rows);
}
