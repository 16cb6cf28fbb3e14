// What goes between the host, the embedding cache's kernels and the caller; compiled after kernels.cu, as one text with it.

// One thread per key: makes the cache's types of what the caller has on the device, and tells if anything is out of range.
//
// Table of key i: tables[i], or one_table if that is not negative. limits: rows of each table, looked at if `bounded`.
// `wrong` stays as it is where all is well: other batches use it too.
KERNEL check_batch(const i64* keys, const i64* tables, i64 one_table, const i64* limits, i64 table_count, i64 bounded,
                   i64 unsigned_keys, short* table_of, int* wrong, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 table = one_table >= 0 ? one_table : tables[i];
    bool good = table >= 0 && table < table_count;
    if (good && unsigned_keys) good = keys[i] >= 0;
    if (good && bounded) good = keys[i] >= 0 && keys[i] < limits[table];
    table_of[i] = good ? (short)table : 0;
    if (!good) atomicOr(wrong, 1);
}

// One thread per key: the batch's outputs, as the caller keeps them.
KERNEL report(const int* slots, const int* miss, int* slot_of, u8* hit, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    slot_of[i] = slots[i];
    hit[i] = miss[i] < 0;
}

// One thread per unique miss: its key, for the host.
KERNEL pick_keys(const i64* keys, const short* tables, const int* first, i64* missed_keys, short* missed_tables, i64 n) {
    i64 r = thread_number();
    if (r >= n) return;
    missed_keys[r] = keys[first[r]];
    missed_tables[r] = tables[first[r]];
}

// One thread: what a background batch leaves of the counters is what it evicted.
KERNEL uncount(i64* counters, const i64* before, i64 n) {
    if (thread_number() > 0) return;
    for (i64 k = 0; k < n; k++)
        if (k != EVICTED) counters[k] = before[k];
}

// One thread per unit of a row: staged[r] is key first[r]'s row, read from the host's memory, zeros after its width.
// Units divide widths, addresses and the staged width.
template <class Unit>
__device__ __forceinline__ void fetch_unit(const i64* addresses, const i64* widths, const i64* keys, const short* tables,
                                           const int* first, u8* staged, i64 units, i64 rows, Unit zero) {
    i64 t = thread_number();
    if (t >= rows * units) return;
    i64 r = t / units;
    i64 unit = t % units;
    int i = first[r];
    i64 wide = widths[tables[i]] / (i64)sizeof(Unit);
    ((Unit*)staged)[t] = unit < wide ? ((const Unit*)addresses[tables[i]])[keys[i] * wide + unit] : zero;
}

KERNEL fetch_rows_16(const i64* addresses, const i64* widths, const i64* keys, const short* tables, const int* first,
                     u8* staged, i64 units, i64 rows) {
    fetch_unit<uint4>(addresses, widths, keys, tables, first, staged, units, rows, uint4{0, 0, 0, 0});
}
KERNEL fetch_rows_4(const i64* addresses, const i64* widths, const i64* keys, const short* tables, const int* first,
                    u8* staged, i64 units, i64 rows) {
    fetch_unit<u32>(addresses, widths, keys, tables, first, staged, units, rows, 0);
}
KERNEL fetch_rows_1(const i64* addresses, const i64* widths, const i64* keys, const short* tables, const int* first,
                    u8* staged, i64 units, i64 rows) {
    fetch_unit<u8>(addresses, widths, keys, tables, first, staged, units, rows, 0);
}

// One thread per unit of a row: out[r] = rows[which[r]].
template <class Unit>
__device__ __forceinline__ void pick_unit(const u8* rows, const int* which, u8* out, i64 units, i64 n) {
    i64 t = thread_number();
    if (t < n * units) ((Unit*)out)[t] = ((const Unit*)rows)[which[t / units] * units + t % units];
}

KERNEL pick_rows_16(const u8* rows, const int* which, u8* out, i64 units, i64 n) { pick_unit<uint4>(rows, which, out, units, n); }
KERNEL pick_rows_4(const u8* rows, const int* which, u8* out, i64 units, i64 n) { pick_unit<u32>(rows, which, out, units, n); }
KERNEL pick_rows_1(const u8* rows, const int* which, u8* out, i64 units, i64 n) { pick_unit<u8>(rows, which, out, units, n); }
