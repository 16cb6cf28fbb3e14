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
//   take_windows     victims for the rest, each from its own window behind the hand
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

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int WAYS = 8;
constexpr int WINDOW = 8;
constexpr int EMPTY = -1;
constexpr int RESERVED = -2;  // of an entry: claimed in this batch, not yet published
constexpr int NO_MISS = 0x7fffffff;
constexpr int GROUP = 32;  // words that share a base in the numbering of set bits

// EmbeddingState.scalars
constexpr int NOW = 0;
constexpr int HAND = 1;
constexpr int N_FRESH = 2;
constexpr int SETS = 3;
constexpr int ROWS_PER_PAGE = 4;

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

// First entry of the index set of a hash: a multiplication instead of a division (Lemire 2019).
__device__ __forceinline__ int set_base(u64 bits, i64 sets) { return (int)(((bits >> 32) * (u64)sets) >> 32) * WAYS; }

__device__ __forceinline__ void count(i64* counter, i64 n) { atomicAdd((u64*)counter, (u64)n); }

// Batches since the slot was used; 0 if it is not evictable. Differences modulo 2**32 survive the counter's wrap.
__device__ __forceinline__ u32 age(const u32* last, const int* pins, const u8* draining, int slot, int page, u32 now) {
    u32 batches = now - last[slot];
    return batches > 0 && pins[page] == 0 && draining[page] == 0 ? batches : 0;
}

// Set bits before bit i. `bases` holds those before each group of words.
__device__ __forceinline__ int bits_before(const u32* bits, const int* bases, i64 i) {
    i64 word = i / 32;
    int before = bases[word / GROUP];
    for (i64 w = word / GROUP * GROUP; w < word; w++) before += __popc(bits[w]);
    return before + __popc(bits[word] & ((1u << (i % 32)) - 1u));
}

// Take a row out of the index, and make its slot older than any live one.
__device__ __forceinline__ void forget(int* entry, u32* last, int slot, i64 now) {
    entry[slot] = EMPTY;
    last[slot] = (u32)(u64)now + 0x80000000u;
}

// One thread per place of the hash tables; places >= 2 n, a power of two.
KERNEL begin_batch(i64* scalars, const int* fill, const int* fresh, i64* totals, int* seen, int* group_set,
                   int* group_top, u32* first_bits, u32* waiting_bits, i64 owned_pages, i64 n, i64 places) {
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
}

// One thread per key. A miss leaves its place in the table of positions in `cell`, a hit -1.
KERNEL probe(const i64* index_key, const short* index_table, const int* index_slot, u32* last, const i64* scalars,
             const short* tables, const i64* keys, int* slots, int* miss, int* cell, int* seen, i64 n, i64 places) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 key = keys[i];
    short table = tables[i];
    u64 bits = hash_key(table, key);
    int base = set_base(bits, scalars[SETS]);
    int found = EMPTY;
    for (int e = base; e < base + WAYS; e++) {
        if (index_key[e] == key && index_slot[e] >= 0 && index_table[e] == table) {
            found = index_slot[e];
            break;
        }
    }
    slots[i] = found;
    miss[i] = EMPTY;
    cell[i] = EMPTY;
    if (found >= 0) {
        __stcg(&last[found], (u32)scalars[NOW]);
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
    int base = set_base(hash_key(tables[i], keys[i]), scalars[SETS]);
    place[r] = base;
    i64 at = (base / WAYS) & (places - 1);
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

// One thread per unique miss. The k-th miss of an index set takes the set's k-th empty entry; when those are used up, its
// oldest evictable entry that the misses before it left. It only chooses: the index stays as it was.
KERNEL claim_entries(const int* index_slot, const u32* last, const int* pins, const u8* draining, const i64* scalars,
                     const i64* totals, const int* group, const int* group_top, int* place, int* miss_slot,
                     u32* waiting_bits) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE]) return;
    int base = place[r];
    place[r] = EMPTY;
    miss_slot[r] = EMPTY;
    const int* top = group_top + (i64)group[r] * WAYS;
    int rank = 0;
    while (rank < WAYS && top[rank] != r) rank++;
    if (rank == WAYS) return;
    int empties = 0;
    for (int e = base; e < base + WAYS; e++) {
        if (index_slot[e] != EMPTY) continue;
        if (empties == rank) {
            place[r] = e;
            atomicOr(&waiting_bits[r / 32], 1u << (r % 32));
            return;
        }
        empties++;
    }
    int rows_per_page = (int)scalars[ROWS_PER_PAGE];
    u32 now = (u32)scalars[NOW];
    int chosen = EMPTY;
    int chosen_slot = EMPTY;
    u32 chosen_age = 0;
    for (int k = empties; k <= rank; k++) {
        int next = EMPTY;
        int next_slot = EMPTY;
        u32 next_age = 0;
        for (int e = base; e < base + WAYS; e++) {
            int slot = index_slot[e];
            if (slot < 0) continue;
            u32 a = age(last, pins, draining, slot, slot / rows_per_page, now);
            bool later = chosen < 0 || a < chosen_age || (a == chosen_age && slot > chosen_slot);
            if (a > 0 && later && (a > next_age || (a == next_age && slot < next_slot))) {
                next = e;
                next_slot = slot;
                next_age = a;
            }
        }
        if (next < 0) return;
        chosen = next;
        chosen_slot = next_slot;
        chosen_age = next_age;
    }
    place[r] = chosen;
    miss_slot[r] = chosen_slot;
}

// One thread per unique miss. The j-th miss that waits for a slot takes the j-th slot never filled, if there are so many.
// It walks the stack of pages to get there: j / rows_per_page steps, more only where a page was handed out in part.
KERNEL admit(i64* index_key, short* index_table, int* index_slot, u32* last, const int* fill, const int* fresh,
             i64* counters, const i64* scalars, const i64* totals, const short* tables, const i64* keys,
             const int* first, const int* place, int* miss_slot, const u32* waiting_bits, const int* bases) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE] || place[r] < 0) return;
    int e = place[r];
    int slot = miss_slot[r];
    index_key[e] = keys[first[r]];
    index_table[e] = tables[first[r]];
    index_slot[e] = RESERVED;
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
    last[slot] = (u32)scalars[NOW];
}

// One thread per unique miss; those that still wait take the oldest evictable slot of their window. Windows are disjoint,
// and so are their slots' entries. What this launch writes in `last` no other thread of it reads.
KERNEL take_windows(int* index_slot, int* entry, u32* last, const int* pins, const u8* draining, const int* lists,
                    i64* counters, const i64* scalars, const i64* totals, const int* place, int* miss_slot,
                    const u32* waiting_bits, const int* bases) {
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
        u32 a = age(last, pins, draining, candidate, page, now);
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
    if (entry[slot] != EMPTY) {
        index_slot[entry[slot]] = EMPTY;
        entry[slot] = EMPTY;
        count(&counters[EVICTED], 1);
    }
    last[slot] = now;
    miss_slot[r] = slot;
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
    i64 filled = waiting < totals[UNFILLED] ? waiting : totals[UNFILLED];
    i64 windows = waiting - filled < totals[WINDOWS] ? waiting - filled : totals[WINDOWS];
    scalars[HAND] = totals[SLOTS] > 0 ? (totals[START] + windows * WINDOW) % totals[SLOTS] : 0;
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
KERNEL publish(int* index_slot, int* entry, const i64* totals, const int* place, const int* miss_slot) {
    i64 r = thread_number();
    if (r >= totals[UNIQUE] || place[r] < 0) return;
    int slot = miss_slot[r];
    index_slot[place[r]] = slot >= 0 ? slot : EMPTY;
    if (slot >= 0) entry[slot] = place[r];
}

// One thread per key: take back the last batch, whose rows did not come. Its victims stay evicted.
KERNEL retract(int* index_slot, int* entry, u32* last, const i64* scalars, i64* counters, const int* miss,
               const int* first, const int* miss_slot, i64 n) {
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
    if (slot >= 0 && entry[slot] != EMPTY) {
        index_slot[entry[slot]] = EMPTY;
        forget(entry, last, slot, scalars[NOW]);
    }
}

// One thread per key. Of several copies of a key, the one that empties the entry counts it.
KERNEL invalidate(const i64* index_key, const short* index_table, int* index_slot, int* entry, u32* last,
                  const i64* scalars, const short* tables, const i64* keys, i64* gone, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 key = keys[i];
    short table = tables[i];
    int base = set_base(hash_key(table, key), scalars[SETS]);
    for (int e = base; e < base + WAYS; e++) {
        if (index_key[e] != key || index_table[e] != table || __ldcg(&index_slot[e]) < 0) continue;
        int slot = atomicExch(&index_slot[e], EMPTY);
        if (slot >= 0) {
            forget(entry, last, slot, scalars[NOW]);
            count(gone, 1);
        }
        return;
    }
}

// One thread per key: whether it is cached.
KERNEL contains(const i64* index_key, const short* index_table, const int* index_slot, const i64* scalars,
                const short* tables, const i64* keys, u8* found, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    int base = set_base(hash_key(tables[i], keys[i]), scalars[SETS]);
    found[i] = 0;
    for (int e = base; e < base + WAYS; e++)
        if (index_key[e] == keys[i] && index_table[e] == tables[i] && index_slot[e] >= 0) found[i] = 1;
}

// One thread per slot of the page that was handed out: erase its row from the index, before the slot can be anyone else's.
KERNEL unpublish_page(int* index_slot, int* entry, i64* counters, const i64* scalars, i64 page, i64 rows) {
    i64 t = thread_number();
    if (t >= rows) return;
    i64 slot = page * scalars[ROWS_PER_PAGE] + t;
    int e = entry[slot];
    if (e == EMPTY) return;
    index_slot[e] = EMPTY;
    entry[slot] = EMPTY;
    count(&counters[EVICTED], 1);
}

// One thread per slot asked for: the batch of its last use, by which the host chooses a page to give up.
KERNEL read_last(const u32* last, const int* slots, u32* values, i64 n) {
    i64 i = thread_number();
    if (i < n) values[i] = last[slots[i]];
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
