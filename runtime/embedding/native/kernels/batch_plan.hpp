// Which distinct rows a batch needs of each table: one call for all fields and tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffers.hpp"

namespace embedding {

struct TableShape {
  size_t dim;
  bool share_rows;          // fields see the same rows: the field's number is left out of the id
  uint32_t rounds;          // of a hash stack, whose rows make up an id; 0: the id has its own row
  uint64_t rows_per_round;
};

struct BatchIds {
  const uint64_t* ids;
  size_t n;
  const int64_t* offsets;  // [bags + 1], null: one id in every bag
  size_t bags;
  size_t fields;           // bags of a sample
  const int32_t* table_of_field;
  uint64_t value_mask;     // of the part of an id that is not its field's number
  uint32_t shards;
};

// Of all tables, side by side.
struct BatchPlan {
  Column<uint64_t> ids{0};          // distinct, of each table grouped by shard; `spans` has their end
  Column<int32_t> inverse{0};       // one entry for each round of each occurrence
  Column<int64_t> occurrences{0};   // where in the batch's ids; empty where there is one table
  std::vector<int64_t> spans;       // [tables, 3]: first id, ids, element where the first row starts
  std::vector<int64_t> bounds;      // [tables, shards + 1]: where a shard's ids start
  std::vector<int64_t> starts;      // [2, tables + 1]: of `inverse`, of `occurrences`
};

BatchPlan plan_batch(const BatchIds& batch, const std::vector<TableShape>& tables);

}  // namespace embedding
