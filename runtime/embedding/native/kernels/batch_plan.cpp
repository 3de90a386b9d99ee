#include "batch_plan.hpp"

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

TablePart merge(const uint64_t* ids, size_t n, Column<int64_t> occurrences, const TableShape& shape,
                const BatchIds& batch) {
  static thread_local std::vector<uint64_t> kept_rows;
  if (shape.rounds) {
    stack(ids, n, shape, batch.value_mask, kept_rows);
    ids = kept_rows.data();
    n = kept_rows.size();
  }
  TablePart part{{}, Column<int32_t>(n), std::move(occurrences)};
  merge_duplicates(ids, n, batch.shards, part.inverse.data(), part.distinct);
  return part;
}

}  // namespace

std::vector<TablePart> plan_batch(const BatchIds& batch, const std::vector<TableShape>& tables) {
  static thread_local std::vector<uint64_t> kept_ids;
  std::vector<uint64_t>& gathered = kept_ids;  // table by table
  std::vector<TablePart> parts;
  const size_t count = tables.size();
  if (count == 1 && !tables[0].share_rows) {
    parts.push_back(merge(batch.ids, batch.n, Column<int64_t>(0), tables[0], batch));
    return parts;
  }
  const auto length = [&](size_t bag) {
    return batch.offsets ? static_cast<size_t>(batch.offsets[bag + 1] - batch.offsets[bag]) : 1;
  };
  std::vector<size_t> start(count + 1, 0), at(count, 0);
  for (size_t bag = 0, f = 0; bag < batch.bags; ++bag, f = f + 1 == batch.fields ? 0 : f + 1) {
    start[batch.table_of_field[f] + 1] += length(bag);
  }
  for (size_t t = 0; t < count; ++t) start[t + 1] += start[t];
  std::vector<Column<int64_t>> places;
  places.reserve(count);
  std::vector<int64_t*> place(count);
  for (size_t t = 0; t < count; ++t) {
    places.emplace_back(count == 1 ? 0 : start[t + 1] - start[t]);
    place[t] = count == 1 ? nullptr : places[t].data();
  }
  gathered.resize(batch.n);
  size_t occurrence = 0;
  for (size_t bag = 0, f = 0; bag < batch.bags; ++bag, f = f + 1 == batch.fields ? 0 : f + 1) {
    const auto t = static_cast<size_t>(batch.table_of_field[f]);
    const uint64_t mask = tables[t].share_rows ? batch.value_mask : ~uint64_t{0};
    for (size_t end = occurrence + length(bag); occurrence < end; ++occurrence) {
      gathered[start[t] + at[t]] = batch.ids[occurrence] & mask;
      if (place[t]) place[t][at[t]] = static_cast<int64_t>(occurrence);
      ++at[t];
    }
  }
  parts.reserve(count);
  for (size_t t = 0; t < count; ++t) {
    parts.push_back(merge(&gathered[start[t]], start[t + 1] - start[t], std::move(places[t]),
                          tables[t], batch));
  }
  return parts;
}

}  // namespace embedding
