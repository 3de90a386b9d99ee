// Plans: the distinct ids of arrays and of batches.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "batch_plan.hpp"
#include "bind_arrays.hpp"
#include "dedup.hpp"

namespace embedding {

namespace {

template <class T>
nb::ndarray<nb::numpy, T> line(void* data, size_t bytes, size_t n) {
  auto* held = new Buffer{data, bytes};
  nb::capsule owner(held, [](void* p) noexcept {
    auto* buffer = static_cast<Buffer*>(p);
    give_buffer(buffer->data, buffer->bytes);
    delete buffer;
  });
  return nb::ndarray<nb::numpy, T>(data, {n}, owner);
}

template <class T>
nb::ndarray<nb::numpy, T> give_column(Column<T>& column) {
  const size_t bytes = column.bytes(), n = column.size();
  return line<T>(column.release(), bytes, n);
}

nb::tuple plan_ids(const Ids& ids, uint32_t shards, const Int32s& inverse) {
  require(shards >= 1, "shards must be >= 1");
  require(inverse.shape(0) >= ids.shape(0), "inverse must be as long as ids");
  Distinct found;
  {
    nb::gil_scoped_release free;
    merge_duplicates(ids.data(), ids.shape(0), shards, inverse.data(), found);
  }
  return nb::make_tuple(give_column(found.ids), give(std::move(found.bounds), {size_t{shards} + 1}));
}

// (whether fields share rows, rounds of a hash stack, its rows per round)
using PythonTable = std::tuple<bool, uint32_t, uint64_t>;

nb::list plan_tables(const Ids& ids, const Offsets& offsets, const Inverse& table_of_field,
                     const std::vector<PythonTable>& tables, uint64_t value_mask,
                     uint32_t shards) {
  const size_t fields = table_of_field.shape(0);
  const bool bags = offsets.shape(0) > 0;
  require(shards >= 1 && fields >= 1, "there must be a shard and a field");
  const size_t count = bags ? offsets.shape(0) - 1 : ids.shape(0);
  require(count % fields == 0 || tables.size() == 1, "a sample has one bag for each field");
  require(!bags || static_cast<size_t>(offsets.data()[count]) == ids.shape(0),
          "offsets must end where ids do");
  for (size_t f = 0; f < fields; ++f) {
    require(table_of_field.data()[f] >= 0 &&
                static_cast<size_t>(table_of_field.data()[f]) < tables.size(),
            "each field has one of the tables");
  }
  std::vector<TableShape> shapes;
  for (const auto& [share_rows, rounds, rows] : tables) {
    require(!rounds || rows, "a hash stack has at least one row per round");
    shapes.push_back({share_rows, rounds, rows});
  }
  std::vector<TablePart> parts;
  {
    nb::gil_scoped_release free;
    parts = plan_batch({ids.data(), ids.shape(0), bags ? offsets.data() : nullptr, count, fields,
                        table_of_field.data(), value_mask, shards},
                       shapes);
  }
  nb::list out;
  for (TablePart& part : parts) {
    out.append(nb::make_tuple(give_column(part.distinct.ids),
                              give(std::move(part.distinct.bounds), {size_t{shards} + 1}),
                              give_column(part.inverse), give_column(part.occurrences)));
  }
  return out;
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("plan", &plan_ids, nb::arg("ids"), nb::arg("shards"), nb::arg("inverse"));
  module.def("plan_tables", &plan_tables, nb::arg("ids"), nb::arg("offsets"),
             nb::arg("table_of_field"), nb::arg("tables"), nb::arg("value_mask"),
             nb::arg("shards"));
}

}  // namespace embedding
