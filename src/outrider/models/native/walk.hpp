// The walk along the target's own choices, the twin of acceptance/coupled.py.
#pragma once
#include <cstdint>
#include <vector>

// A row's walk: how many guesses were accepted, whether others were rejected after them, the next token, then the accepted nodes.
constexpr int WALK_HEAD = 3;

// Trees with parents (null for chains), of `size` nodes, and the choice after each node. The deepest path whose guesses are the choices
// wins, and of equally deep ones the first.
class Walk {
  public:
    void follow(const int64_t* tokens, const int64_t* parents, int size, const int64_t* choices, int64_t* out) {
        depths.assign(size_t(size), -1), depths[0] = 0;  // -1: not reached
        int end = 0;
        bool is_rejected = false;
        const auto above = [&](int node) { return parents ? int(parents[node]) : node - 1; };
        for (int node = 1; node < size; node++) {
            const int parent = above(node);
            if (depths[parent] < 0 || tokens[node] != choices[parent]) continue;
            depths[node] = depths[parent] + 1;
            if (depths[node] > depths[end]) end = node;
        }
        for (int node = 1; node < size; node++) is_rejected |= above(node) == end;
        out[0] = depths[end], out[1] = is_rejected, out[2] = choices[end];
        for (int at = end, place = depths[end]; at > 0; at = above(at)) out[WALK_HEAD + --place] = at;
    }

  private:
    std::vector<int> depths;
};
