// Which experts rows go to, by the logits of a router. All that decides is computed in double and
// rounded once, or is one operation on floats: whoever writes it out finds the same experts.
#pragma once

#include <cstdint>

namespace kvspan {

struct Routing {
    const float* logits;  // [rows, experts]
    std::int64_t rows;
    int experts;
    const float* bias;  // [experts], by which experts are ranked, but not weighed; or null
    bool sigmoid;       // of each logit by itself; else a softmax over all experts
    int groups;         // of neighbouring experts, all of a size
    int groups_per_row;  // that a row may pick from: those with the greatest sums
    int group_scores;    // of so many of their best scores
    int per_row;         // experts
    bool normalise;      // whether a row's weights are made to sum to 1, before they are scaled
    double scale;
    std::int64_t* chosen;  // [rows, per_row], the best first; of equal ones, the first
    float* weights;        // [rows, per_row]
};

void find_experts(const Routing& call, int threads);

}  // namespace kvspan
