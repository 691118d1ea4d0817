// Attention in float32 on vectors of any width, for each kind of query and of element in the cache.
#pragma once

#include "flash.h"
#include "spin.h"
#include "vectors.h"

namespace kvspan {
namespace {

template <class Query, class T>
struct Generic {
    using Element = T;
    static constexpr int KEYS = WIDTH == 16 ? 4 : 2;  // register blocks: KEYS x LANES sums of scores,
    static constexpr int LANES = 4;                   // LANES x VECTORS sums of outputs
    static constexpr int VECTORS = WIDTH == 16 ? 4 : 2;

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const int dim = call.head_dim, width = padded(dim);
        for (int lane = 0; lane < unit.head_lanes(); ++lane) {
            const Place place = place_of(call, unit, first + lane);
            const Query* from = static_cast<const Query*>(call.query) +
                                place.row * call.query_row_stride +
                                place.head * call.query_head_stride;
            float* to = scratch.query + static_cast<std::int64_t>(lane) * width;
            for (int d = 0; d < width; d += WIDTH) {
                store(to + d, d + WIDTH <= dim ? load(from + d)
                              : d < dim        ? load_some(from + d, dim - d)
                                               : Vec{});
            }
        }
    }

    static void scores(const Attention& call, int lanes, const Tile<T>& tile, Ahead<T>& ahead,
                       const Scratch& scratch, const Part& part, float* to) {
        for (int key = 0; key < tile.count; key += KEYS) {
            ahead.ask(KEYS);
            int lane = 0;
            for (; lane + LANES <= lanes; lane += LANES)
                dot<LANES>(call, lane, key, tile, scratch, part, to);
            for (; lane < lanes; ++lane) dot<1>(call, lane, key, tile, scratch, part, to);
        }
    }

    static Vec weigh(const Tile<T>& tile, const Scratch& scratch, int lane, float scale, float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        float* weights = scratch.weights + lane * TILE_KEYS;
        Vec total{};
        for (int i = 0; i < TILE_KEYS; i += WIDTH) {
            const Vec weight = kvspan::exp2(load(scores + i) * scale - max);
            total += weight;
            store(weights + i, IS_CODE<T> ? weight * load(tile.value_scales + i) : weight);
        }
        return total;
    }

    static void accumulate(const Attention& call, int lanes, const Tile<T>& tile, Ahead<T>& ahead,
                           const Scratch& scratch, const float* fade, float* out) {
        for (int d = 0; d < call.value_dim; d += VECTORS * WIDTH) {
            ahead.ask(VECTORS * WIDTH * TILE_KEYS / call.value_dim);
            int lane = 0;
            for (; lane + LANES <= lanes; lane += LANES)
                add<LANES>(call, lane, d, tile, scratch, fade, out);
            for (; lane < lanes; ++lane) add<1>(call, lane, d, tile, scratch, fade, out);
        }
    }

    static void finish(const Attention&, const Unit&, float*) {}

private:
    template <int N>
    static void dot(const Attention& call, int lane, int key, const Tile<T>& tile,
                    const Scratch& scratch, const Part& part, float* to) {
        const int end = part.first + part.dims, width = padded(call.head_dim);
        const float* query = scratch.query + static_cast<std::int64_t>(lane) * width;
        Vec sums[N][KEYS] = {};
        int d = part.first;
        const auto step = [&](const auto& at) {
            Vec keys[KEYS];
            for (int k = 0; k < KEYS; ++k) keys[k] = at(tile.keys[key + k] + d);
            for (int n = 0; n < N; ++n) {
                const Vec q = at(query + n * width + d);
                for (int k = 0; k < KEYS; ++k) sums[n][k] += q * keys[k];
            }
        };
        for (; d + WIDTH <= end; d += WIDTH) step([](const auto* p) { return load(p); });
        if (d < end) step([&](const auto* p) { return load_some(p, end - d); });
        for (int n = 0; n < N; ++n) {
            for (int k = 0; k < KEYS; ++k) to[(lane + n) * TILE_KEYS + key + k] = sum(sums[n][k]);
        }
    }

    template <int N>
    static void add(const Attention& call, int lane, int d, const Tile<T>& tile, const Scratch& scratch,
                    const float* fade, float* out) {
        const int width = padded(call.value_dim), left = call.value_dim - d;
        if (left >= VECTORS * WIDTH) {
            add_vectors<N, VECTORS>(width, WIDTH, lane, d, tile, scratch, fade, out);
            return;
        }
        for (int v = 0; v < left; v += WIDTH) {
            add_vectors<N, 1>(width, left - v, lane, d + v, tile, scratch, fade, out);
        }
    }

    // `left`: elements there are from `d` on; a vector that has fewer than WIDTH is filled up with
    // zeros.
    template <int N, int V>
    static void add_vectors(int width, int left, int lane, int d, const Tile<T>& tile,
                            const Scratch& scratch, const float* fade, float* out) {
        Vec sums[N][V];
        for (int n = 0; n < N; ++n) {
            for (int v = 0; v < V; ++v) {
                sums[n][v] = load(out + static_cast<std::int64_t>(lane + n) * width + d + v * WIDTH) *
                             fade[lane + n];
            }
        }
        for (int key = 0; key < tile.count; ++key) {
            Vec values[V];
            for (int v = 0; v < V; ++v) {
                const T* at = tile.values[key] + d + v * WIDTH;
                values[v] = left >= WIDTH ? load(at) : load_some(at, left);
            }
            for (int n = 0; n < N; ++n) {
                const float weight = scratch.weights[(lane + n) * TILE_KEYS + key];
                for (int v = 0; v < V; ++v) sums[n][v] += values[v] * weight;
            }
        }
        for (int n = 0; n < N; ++n) {
            for (int v = 0; v < V; ++v) {
                store(out + static_cast<std::int64_t>(lane + n) * width + d + v * WIDTH, sums[n][v]);
            }
        }
    }
};

// See `spin` in isa.h.
inline double spin_floats(std::int64_t rounds) {
    const auto step = [](Vec sum, Vec x) __attribute__((always_inline)) { return sum + x * x; };
    spin_in_registers<Vec>(rounds, Vec{}, step);
    return 2.0 * WIDTH * CHAINS * static_cast<double>(rounds);
}

template <class Query>
inline Kernel generic_kernel_of(Dtype stored) {
    switch (stored) {
        case Dtype::i8:
            return flash<Generic<Query, I8>>;
        case Dtype::e4m3:
            return flash<Generic<Query, E4m3>>;
        default:
            return flash<Generic<Query, Query>>;
    }
}

inline Kernel generic_kernel(Dtype dtype, Dtype stored) {
    switch (dtype) {
        case Dtype::bf16:
            return generic_kernel_of<Bf16>(stored);
        case Dtype::f16:
            return generic_kernel_of<F16>(stored);
        default:
            return generic_kernel_of<float>(stored);
    }
}

}  // namespace
}  // namespace kvspan
