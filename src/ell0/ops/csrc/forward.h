// out (n, rows), tile by tile: some rows of the weight, the samples of one group.
#pragma once
#include "trim.h"

namespace NAME {

template <class T> struct Forward {
    static constexpr int L = LANES<T>;
    static constexpr int64_t TOGETHER = 8;           // groups that take a tile's rows while these are in the cache
    static constexpr int64_t PANEL_BYTES = 8 << 20;  // samples are packed a slab at a time

    const T *x, *weight, *bias;
    const int32_t* order;
    const T *ranked, *bound, *limit;
    int64_t n, rows, d, top, bottom;
    T* out;  // the dense product with bias on entry
    T* cuts;
    int32_t *ties, *walked;  // these three may be null

    // What a thread works in.
    struct Desk {
        Tray<T> tray;
        Buffer<T> by_coordinate, scratch;
        Leading<T, TILE> leads;
        Guess<T> guess[TOGETHER] = {};  // of these groups
        Weights<T> about[TILE] = {};    // of these rows
    };

    Row<T> row(int64_t o, Desk& desk) const {
        const int64_t blocks = (d + 15) / 16;
        // Rows lie far apart and only their beginnings are read: fetch the next one's.
        for (int line = 0; line < 3 && o + 1 < rows; ++line) {
            __builtin_prefetch((const char*)(ranked + (o + 1) * d) + 64 * line);
            __builtin_prefetch((const char*)(order + (o + 1) * d) + 64 * line);
            __builtin_prefetch((const char*)(bound + (o + 1) * blocks) + 64 * line);
        }
        const T b = bias ? bias[o] : T(0);
        const int place = (int)(o % TILE);
        return {weight + o * d, ranked + o * d, bound + o * blocks, order + o * d, b, &desk.leads, place,
                &desk.about[place]};
    }

    T norm(const T* w) const {
        V<T> squares[4] = {};
        int64_t i = 0;
        for (; i + 4 * L <= d; i += 4 * L)
            for (int c = 0; c < 4; ++c) squares[c] += load(w + i + c * L) * load(w + i + c * L);
        T all = sum<T>((squares[0] + squares[1]) + (squares[2] + squares[3]));
        for (; i < d; ++i) all += w[i] * w[i];
        return std::sqrt(all);
    }

    // A tile of out, turned so that samples lie in the lanes, and back.
    void fetch(T (*value)[L], const T* corner, int count, int lanes) const {
        if (count < TILE || lanes < L) {
            for (int l = 0; l < lanes; ++l)
                for (int r = 0; r < count; ++r) value[r][l] = corner[l * rows + r];
            return;
        }
        for (int r = 0; r < TILE; r += L) {
            V<T> v[L];
            for (int l = 0; l < L; ++l) v[l] = load(corner + l * rows + r);
            transpose<T>(v);
            for (int i = 0; i < L; ++i) store(value[r + i], v[i]);
        }
    }
    void put(T (*value)[L], T* corner, int count, int lanes) const {
        if (count < TILE || lanes < L) {
            for (int l = 0; l < lanes; ++l)
                for (int r = 0; r < count; ++r) corner[l * rows + r] = value[r][l];
            return;
        }
        for (int r = 0; r < TILE; r += L) {
            V<T> v[L];
            for (int i = 0; i < L; ++i) v[i] = load(value[r + i]);
            transpose<T>(v);
            for (int l = 0; l < L; ++l) store(corner + l * rows + r, v[l]);
        }
    }
    // Leaves the cuts behind; says whether a term tied with one stays. Only then are ties written: they come as zeros.
    bool keep(const Cuts<T>& found, V<T> high, int64_t o, int64_t first, int lanes) const {
        const int64_t at = o * n + first, other = rows * n;
        auto copy = [&](int count) {
            std::memcpy(cuts + at, &high, count * sizeof(T));
            std::memcpy(cuts + other + at, &found.low, count * sizeof(T));
        };
        lanes == L ? copy(L) : copy(lanes);
        if (!any((found.ties_high != 0) | (found.ties_low != 0))) return false;
        for (int l = 0; l < lanes; ++l) {
            ties[at + l] = (int32_t)found.ties_high[l];
            ties[other + at + l] = (int32_t)found.ties_low[l];
        }
        return true;
    }

    // The larger depth, marked if either is.
    static int32_t deeper(int32_t a, int32_t b) {
        const int32_t most = depth_of(a) > depth_of(b) ? depth_of(a) : depth_of(b);
        return a < 0 || b < 0 ? ~most : most;
    }

    // Rows o0 .. o0 + count and one group, whose leading terms lie on the desk.
    void tile(const Trim<T>& trim, const Group<T>& group, Desk& desk, int64_t o0, int count, int64_t first,
              int32_t* depths) const {
        const int lanes = n - first < L ? (int)(n - first) : L;
        const V<T> nan = all<T>(__builtin_nanf(""));
        alignas(64) T value[TILE][L] = {};
        fetch(value, out + first * rows + o0, count, lanes);
        Cuts<T> found{};
        for (int r = 0; r < count; ++r) {
            const int64_t o = o0 + r;
            const Row<T> current = row(o, desk);
            const bool undefined = current.bound[0] != current.bound[0];
            const M<T> lost = undefined ? M<T>{} == 0 : group.undefined;
            V<T> v = where<T>(~lost, load(value[r]));
            if (!undefined) trim.row(current, group, desk.tray, v, desk.guess[(first / L) % TOGETHER], found);
            store(value[r], lost ? nan : v);
            if (!cuts) continue;
            const bool tied = keep(found, lost ? nan : found.high, o, first, lanes);
            // As far as this a term that is in the dense product may have been removed.
            const bool finite = current.bound[0] <= Lanes<T>::MAX;
            const V<T> cut = trim.narrower(found.high, found.low);
            const int64_t depth = finite ? trim.depth(current, group.span, cut, 0) : d;
            depths[o] = (int32_t)(tied ? ~depth : depth);
        }
        put(value, out + first * rows + o0, count, lanes);
    }

    void run(int threads) const {
        const Trim<T> trim{d, top, bottom, cuts != nullptr};
        const int64_t groups = (n + L - 1) / L, tiles = (rows + TILE - 1) / TILE;
        const bool walks = (top > bottom ? top : bottom) <= LISTED;
        int64_t slab = PANEL_BYTES / (d * L * (int64_t)sizeof(T)) + 1;
        slab = slab < groups ? slab : groups;
        Buffer<T> panels;
        Buffer<int16_t> keys;
        Buffer<int32_t> depths;
        panels.resize(slab * d * L);
        keys.resize(walks ? 0 : slab * d * L + WIDTH);
        depths.resize(cuts ? slab * rows : 0);
        Group<T>* group = new Group<T>[slab];
        if (cuts) std::memset(walked, 0, rows * sizeof *walked);
        for (int64_t g0 = 0; g0 < groups; g0 += slab) {
            const int64_t here = g0 + slab < groups ? slab : groups - g0;
#pragma omp parallel num_threads(threads)
            {
                Desk desk;
                desk.scratch.resize(d);
#pragma omp for schedule(dynamic)
                for (int64_t g = 0; g < here; ++g) {
                    group[g].pack(x, limit, n, d, (g0 + g) * L, top + bottom, walks, &panels[g * d * L],
                                  desk.scratch.data);
                    if (!walks) group[g].quantize(d, &keys[g * d * L]);
                }
                int64_t most = 0;
                for (int64_t g = 0; g < here; ++g) most = group[g].leads > most ? group[g].leads : most;
                desk.tray.resize(d + most);
                desk.by_coordinate.resize(most ? d * TILE : 0);
                desk.leads.buffer.resize(most * TILE);
                desk.leads.lists.resize(most ? 2 * PLACES * TILE : 0);
                int64_t last = -1;
#pragma omp for schedule(dynamic) collapse(2)
                for (int64_t some = 0; some < here; some += TOGETHER)
                    for (int64_t t = 0; t < tiles; ++t) {
                        for (Guess<T>& guess : desk.guess) guess.made &= some == last;
                        last = some;
                        const int64_t o0 = t * TILE;
                        const int count = rows - o0 < TILE ? (int)(rows - o0) : TILE;
                        bool turned = false;
                        for (int r = 0; r < count && !walks; ++r) desk.about[r] = {norm(weight + (o0 + r) * d), 0, 0};
                        for (int64_t g = some; g < here && g < some + TOGETHER; ++g) {
                            if (group[g].leads) {
                                if (!turned) turn<TILE>(weight + o0 * d, count, d, desk.by_coordinate.data);
                                turned = true;
                                trim.lead(group[g], desk.by_coordinate.data, desk.leads);
                            }
                            tile(trim, group[g], desk, o0, count, (g0 + g) * L, depths.data + (cuts ? g * rows : 0));
                        }
                    }
            }
            for (int64_t g = 0; cuts && g < here; ++g)
                for (int64_t o = 0; o < rows; ++o) walked[o] = deeper(walked[o], depths[g * rows + o]);
        }
        delete[] group;
    }
};

}  // namespace NAME
