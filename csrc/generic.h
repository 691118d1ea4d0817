// Attention in float32 on vectors of any width, for each kind of element in the cache.
#pragma once

#include "flash.h"
#include "vectors.h"

namespace kvspan {
namespace {

template <class T>
struct Generic {
    using Element = T;
    static constexpr int KEYS = WIDTH == 16 ? 4 : 2;  // register blocks: KEYS x LANES sums of scores,
    static constexpr int LANES = 4;                   // LANES x VECTORS sums of outputs
    static constexpr int VECTORS = WIDTH == 16 ? 4 : 2;

    static float largest(const float* scores) {
        Vec max = load(scores);
        for (int i = WIDTH; i < TILE_KEYS; i += WIDTH) max = larger(max, load(scores + i));
        return kvspan::largest(max);
    }

    static float exp2(float x) { return kvspan::exp2(splat(x))[0]; }

    static void load_query(const Attention& call, const Unit& unit, const Scratch& scratch) {
        const int dim = call.head_dim, width = padded(dim);
        for (int lane = 0; lane < unit.lanes(); ++lane) {
            const T* from = static_cast<const T*>(call.query) +
                            (unit.first_row + lane / unit.heads) * call.query_row_stride +
                            (unit.first_head + lane % unit.heads) * call.query_head_stride;
            float* to = scratch.query + static_cast<std::int64_t>(lane) * width;
            for (int d = 0; d < width; d += WIDTH) {
                store(to + d, d + WIDTH <= dim ? load(from + d)
                              : d < dim        ? load_some(from + d, dim - d)
                                               : Vec{});
            }
        }
    }

    static void scores(const Attention& call, int lanes, const Tile<T>& tile, const Tile<T>& next,
                       const Scratch& scratch) {
        for (int key = 0; key < tile.count; key += KEYS) {
            fetch(next.keys, next, key, KEYS, call.head_dim);
            int lane = 0;
            for (; lane + LANES <= lanes; lane += LANES) dot<LANES>(call, lane, key, tile, scratch);
            for (; lane < lanes; ++lane) dot<1>(call, lane, key, tile, scratch);
        }
    }

    static float weigh(const Scratch& scratch, int lane, float scale, float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        float* weights = scratch.weights + lane * TILE_KEYS;
        Vec total{};
        for (int i = 0; i < TILE_KEYS; i += WIDTH) {
            const Vec weight = kvspan::exp2(load(scores + i) * scale - max);
            store(weights + i, weight);
            total += weight;
        }
        return sum(total);
    }

    static void accumulate(const Attention& call, int lanes, const Tile<T>& tile, const Tile<T>& next,
                           const Scratch& scratch, const float* fade, float* out) {
        fetch(next.values, next, 0, TILE_KEYS, call.value_dim);
        for (int d = 0; d < call.value_dim; d += VECTORS * WIDTH) {
            int lane = 0;
            for (; lane + LANES <= lanes; lane += LANES)
                add<LANES>(call, lane, d, tile, scratch, fade, out);
            for (; lane < lanes; ++lane) add<1>(call, lane, d, tile, scratch, fade, out);
        }
    }

    static void finish(const Attention&, int, float*) {}

private:
    // Asks for what the next tile reads at its keys [key, key + count).
    static void fetch(const T* const* rows, const Tile<T>& next, int key, int count, int dim) {
        if (next.seen == 0) return;
        for (int i = key; i < key + count && i < TILE_KEYS; ++i) {
            for (int d = 0; d < dim; d += 64 / static_cast<int>(sizeof(T)))
                __builtin_prefetch(rows[i] + d);
        }
    }

    template <int N>
    static void dot(const Attention& call, int lane, int key, const Tile<T>& tile,
                    const Scratch& scratch) {
        const int dim = call.head_dim, width = padded(dim);
        const float* query = scratch.query + static_cast<std::int64_t>(lane) * width;
        Vec sums[N][KEYS] = {};
        int d = 0;
        const auto step = [&](const auto& key_at) {
            Vec keys[KEYS];
            for (int k = 0; k < KEYS; ++k) keys[k] = key_at(tile.keys[key + k] + d);
            for (int n = 0; n < N; ++n) {
                const Vec q = load(query + n * width + d);
                for (int k = 0; k < KEYS; ++k) sums[n][k] += q * keys[k];
            }
        };
        for (; d + WIDTH <= dim; d += WIDTH) step([](const T* p) { return load(p); });
        if (d < dim) step([&](const T* p) { return load_some(p, dim - d); });
        for (int n = 0; n < N; ++n) {
            for (int k = 0; k < KEYS; ++k)
                scratch.scores[(lane + n) * TILE_KEYS + key + k] = sum(sums[n][k]);
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

inline Kernel generic_kernel(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16:
            return flash<Generic<Bf16>>;
        case Dtype::f16:
            return flash<Generic<F16>>;
        default:
            return flash<Generic<float>>;
    }
}

}  // namespace
}  // namespace kvspan
