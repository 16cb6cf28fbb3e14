// Stands in for the built-ins of CUDA C++, so that a host compiler takes kernels whose threads need not meet.
//
// A launch runs every thread of the grid: forward, in reverse, in a random order, or dealt at random to a few threads of the
// system that run at once. Atomics are atomic then, too, and __ldcg and __stcg are relaxed loads and stores: what
// ThreadSanitizer finds beside them is a race on a GPU as well.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline thread_local dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

template <class T> T __ldcg(const T* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
template <class T> void __stcg(T* p, T v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// As in CUDA: the old value is returned, and every overload takes one type.
template <class T> T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <class T> T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
template <class T> T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T* p, T expected, T v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
template <class T> T atomicMin(T* p, T v) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}

enum class Order { forward, reverse, random, parallel };

// Calls `body` as each thread of the grid. A launch is over when all have ended.
// Not a template: it would be compiled once per kernel.
inline void host_launch(unsigned blocks, unsigned threads, Order order, unsigned seed, const std::function<void()>& body) {
    const size_t n = (size_t)blocks * threads;
    auto run = [&](size_t i) {
        blockDim = {threads, 1, 1};
        gridDim = {blocks, 1, 1};
        blockIdx = {unsigned(i / threads), 0, 0};
        threadIdx = {unsigned(i % threads), 0, 0};
        body();
    };
    if (order == Order::forward) {
        for (size_t i = 0; i < n; i++) run(i);
        return;
    }
    if (order == Order::reverse) {
        for (size_t i = n; i--;) run(i);
        return;
    }
    std::vector<size_t> turns(n);
    std::iota(turns.begin(), turns.end(), size_t(0));
    std::mt19937_64 random(seed);
    std::shuffle(turns.begin(), turns.end(), random);
    if (order == Order::random) {
        for (size_t i : turns) run(i);
        return;
    }
    constexpr size_t WORKERS = 4;
    std::vector<std::thread> workers;
    for (size_t w = 0; w < WORKERS; w++)
        workers.emplace_back([&, w] { for (size_t k = w; k < n; k += WORKERS) run(turns[k]); });
    for (std::thread& worker : workers) worker.join();
}
