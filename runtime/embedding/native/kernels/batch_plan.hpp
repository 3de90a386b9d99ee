// Which distinct rows a batch needs of each table: one call for all fields and tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffers.hpp"
#include "dedup.hpp"

namespace embedding {

struct TableShape {
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

struct TablePart {
  Distinct distinct;
  Column<int32_t> inverse;      // one entry for each round of each occurrence
  Column<int64_t> occurrences;  // where in the batch's ids; empty where there is one table
};

std::vector<TablePart> plan_batch(const BatchIds& batch, const std::vector<TableShape>& tables);

}  // namespace embedding
