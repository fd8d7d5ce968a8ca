// A bounded store of what was expensive to make. The longest unused leaves first; what is pinned stays, and
// takes no place from the others. Of one thread at a time: who shares one locks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace mha_deploy {

// Everything that tells two plans apart, as numbers.
using PlanKey = std::vector<int64_t>;

template <typename Plan>
class PlanCache {
public:
    explicit PlanCache(std::size_t capacity) : capacity_(capacity) {}

    // The plan, now the most recently used one; null where there is none.
    std::shared_ptr<Plan> find(PlanKey const& key) {
        auto const known = places_.find(key);
        if (known == places_.end()) {
            return nullptr;
        }
        entries_.splice(entries_.begin(), entries_, known->second);
        return known->second->plan;
    }

    // Keeps the plan and returns it, or the one that is kept under this key already. What had to leave is
    // handed out: the caller knows when it is no longer in use, and letting go may take long.
    std::shared_ptr<Plan> insert(
        PlanKey const& key, std::shared_ptr<Plan> plan, std::vector<std::shared_ptr<Plan>>& evicted) {
        if (auto const known = places_.find(key); known != places_.end()) {
            return known->second->plan;
        }
        entries_.push_front(Entry{key, plan, false});
        places_[key] = entries_.begin();
        shrink(evicted);
        return plan;
    }

    // A captured graph points into the plan from now on: it must outlive any eviction.
    void pin(PlanKey const& key) {
        if (auto const known = places_.find(key); known != places_.end()) {
            pinned_ += known->second->pinned ? 0 : 1;
            known->second->pinned = true;
        }
    }

    std::size_t size() const { return entries_.size(); }

private:
    struct Entry {
        PlanKey key;
        std::shared_ptr<Plan> plan;
        bool pinned;
    };

    void shrink(std::vector<std::shared_ptr<Plan>>& evicted) {
        // From the end, and never the newest: it is about to be used.
        auto entry = std::prev(entries_.end());
        while (entries_.size() - pinned_ > capacity_ && entry != entries_.begin()) {
            auto const before = std::prev(entry);
            if (!entry->pinned) {
                evicted.push_back(std::move(entry->plan));
                places_.erase(entry->key);
                entries_.erase(entry);
            }
            entry = before;
        }
    }

    std::size_t capacity_;
    std::size_t pinned_ = 0;
    std::list<Entry> entries_;
    std::map<PlanKey, typename std::list<Entry>::iterator> places_;
};

}  // namespace mha_deploy
