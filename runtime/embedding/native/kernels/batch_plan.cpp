#include "batch_plan.hpp"

#include <algorithm>

#include "dedup.hpp"
#include "hash.hpp"

namespace embedding {

namespace {

// The rows that each id is made of, in the order of rounds, as runtime.embedding.native.plan.stacked.
void stack(const uint64_t* ids, size_t n, const TableShape& shape, uint64_t value_mask,
           std::vector<uint64_t>& rows) {
  rows.resize(n * shape.rounds);
  for (size_t i = 0; i < n; ++i) {
    uint64_t hash = ids[i];
    for (uint32_t round = 0; round < shape.rounds; ++round) {
      hash = mix64(hash + 1);
      rows[i * shape.rounds + round] = (ids[i] & ~value_mask) |
                                       (hash % shape.rows_per_round + round * shape.rows_per_round);
    }
  }
}

}  // namespace

BatchPlan plan_batch(const BatchIds& batch, const std::vector<TableShape>& tables) {
  static thread_local std::vector<uint64_t> kept_ids, kept_rows;
  const size_t count = tables.size();
  BatchPlan plan;
  plan.starts.assign(2 * (count + 1), 0);
  int64_t* const rows_start = plan.starts.data();
  int64_t* const start = rows_start + count + 1;
  const auto length = [&](size_t bag) {
    return batch.offsets ? batch.offsets[bag + 1] - batch.offsets[bag] : 1;
  };
  if (count == 1) {
    start[1] = static_cast<int64_t>(batch.n);
  } else {
    for (size_t bag = 0, f = 0; bag < batch.bags; ++bag, f = f + 1 == batch.fields ? 0 : f + 1) {
      start[batch.table_of_field[f] + 1] += length(bag);
    }
  }
  for (size_t t = 0; t < count; ++t) {
    rows_start[t + 1] = rows_start[t] + start[t + 1] * std::max<int64_t>(1, tables[t].rounds);
    start[t + 1] += start[t];
  }
  // The ids as tables know them, table by table.
  const uint64_t* gathered = batch.ids;
  if (count > 1 || tables[0].share_rows) {
    kept_ids.resize(batch.n);
    gathered = kept_ids.data();
    if (count > 1) plan.occurrences = Column<int64_t>(batch.n);
    std::vector<int64_t> at(start, start + count);
    int64_t occurrence = 0;
    for (size_t bag = 0, f = 0; bag < batch.bags; ++bag, f = f + 1 == batch.fields ? 0 : f + 1) {
      const auto t = static_cast<size_t>(batch.table_of_field[f]);
      const uint64_t mask = tables[t].share_rows ? batch.value_mask : ~uint64_t{0};
      for (const int64_t end = occurrence + length(bag); occurrence < end; ++occurrence) {
        kept_ids[at[t]] = batch.ids[occurrence] & mask;
        if (count > 1) plan.occurrences.data()[at[t]] = occurrence;
        ++at[t];
      }
    }
  }
  plan.ids = Column<uint64_t>(rows_start[count]);
  plan.inverse = Column<int32_t>(rows_start[count]);
  plan.bounds.resize(count * (batch.shards + 1));
  int64_t first = 0, element = 0;
  for (size_t t = 0; t < count; ++t) {
    const uint64_t* ids = gathered + start[t];
    if (tables[t].rounds) {
      stack(ids, start[t + 1] - start[t], tables[t], batch.value_mask, kept_rows);
      ids = kept_rows.data();
    }
    const auto distinct = static_cast<int64_t>(merge_duplicates(
        ids, rows_start[t + 1] - rows_start[t], batch.shards, plan.inverse.data() + rows_start[t],
        plan.ids.data() + first, &plan.bounds[t * (batch.shards + 1)]));
    plan.spans.insert(plan.spans.end(), {first, distinct, element});
    first += distinct;
    element += distinct * static_cast<int64_t>(tables[t].dim);
  }
  return plan;
}

}  // namespace embedding
