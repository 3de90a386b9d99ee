// Tables: lookups, pushes, snapshots.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.hpp"
#include "options.hpp"
#include "table.hpp"

namespace embedding {

namespace {

template <class Array>
void require_rows(const Array& array, size_t rows, const Options& options, const char* rule) {
  const auto expected = options.wide() ? nb::dtype<double>() : nb::dtype<float>();
  require(array.ndim() == 2 && array.shape(0) >= rows && array.shape(1) == options.dim &&
              array.dtype() == expected,
          rule);
}

constexpr const char* kValueRule = "values must be [n, dim] of the table's dtype";

struct Range {
  size_t start, stop;
};

template <class Array>
Range range_of(const Ids& ids, size_t start, size_t stop, const Int64s& handles,
               const Int64s& writes, const Array& values, const Options& options) {
  require(start <= stop && stop <= ids.shape(0) && handles.shape(0) == ids.shape(0) &&
              writes.shape(0) == ids.shape(0),
          "ids, handles and writes must have one length, and [start, stop) lie in it");
  require_rows(values, ids.shape(0), options, kValueRule);
  return {start, stop};
}

void read_rows(Table& table, const Ids& ids, size_t start, size_t stop, bool create, int64_t step,
          const Int64s& handles, const Matrix& values, const Int64s& writes) {
  range_of(ids, start, stop, handles, writes, values, table.options());
  char* out = static_cast<char*>(values.data()) +
              start * table.options().dim * table.options().compute_bytes();
  nb::gil_scoped_release free;
  table.read(ids.data() + start, stop - start, create, step, handles.data() + start, out,
             writes.data() + start);
}

size_t refresh_rows(Table& table, const Ids& ids, size_t start, size_t stop, int64_t step,
               const Int64s& handles, const Matrix& values, const Int64s& writes) {
  range_of(ids, start, stop, handles, writes, values, table.options());
  char* out = static_cast<char*>(values.data()) +
              start * table.options().dim * table.options().compute_bytes();
  nb::gil_scoped_release free;
  return table.refresh(ids.data() + start, stop - start, step, handles.data() + start, out,
                       writes.data() + start);
}

using PythonPart = std::tuple<Ids, size_t, size_t, Int64s, Int64s, ConstMatrix>;

void push_rows(Table& table, const std::vector<PythonPart>& pushes, int64_t step, double lr,
          const Int64s& staleness) {
  require(staleness.shape(0) == 64, "staleness must have 64 places");
  std::vector<Part> parts;
  for (const auto& [ids, start, stop, handles, writes, gradients] : pushes) {
    range_of(ids, start, stop, handles, writes, gradients, table.options());
    const size_t row = table.options().dim * table.options().compute_bytes();
    parts.push_back({ids.data() + start, handles.data() + start, writes.data() + start,
                     static_cast<const char*>(gradients.data()) + start * row, stop - start});
  }
  nb::gil_scoped_release free;
  table.push(parts, step, lr, staleness.data());
}

nb::tuple all_rows(const Table& table) {
  Rows rows;
  {
    nb::gil_scoped_release free;
    rows = table.rows();
  }
  const size_t n = rows.ids.size();
  const bool wide = table.options().wide();
  return nb::make_tuple(give(std::move(rows.ids), {n}),
                        give_floats(std::move(rows.values), n, table.options().dim, wide),
                        give_floats(std::move(rows.state), n, table.options().state_floats(), wide),
                        give(std::move(rows.writes), {n}));
}

nb::dict give_snapshot(const Table& table, Snapshot found) {
  const size_t n = found.ids.size(), stamps = found.stamps.size();
  const size_t removed = found.removed.size(), sightings = found.sightings.size();
  nb::dict out;
  out["ids"] = give(std::move(found.ids), {n});
  out["words"] = give(std::move(found.words), {n});
  out["stamps"] = give(std::move(found.stamps), {stamps});
  out["rows"] = give(std::move(found.rows), {n, table.options().row_bytes()});
  out["removed"] = give(std::move(found.removed), {removed});
  out["sightings"] = give(std::move(found.sightings), {sightings});
  out["latest_step"] = found.latest_step;
  return out;
}

nb::dict collect_snapshot(Table& table) {
  Image found;
  {
    nb::gil_scoped_release free;
    found = table.collect();
  }
  const size_t n = found.n, removed = found.removed.size();
  const size_t stamps = found.stamps.data() ? n : 0;
  nb::dict out;
  out["ids"] = give_pages<uint64_t>(std::move(found.ids), {n});
  out["words"] = give_pages<uint32_t>(std::move(found.words), {n});
  out["stamps"] = give_pages<uint32_t>(std::move(found.stamps), {stamps});
  out["rows"] = give_pages<uint8_t>(std::move(found.rows), {n, table.options().row_bytes()});
  out["removed"] = give(std::move(found.removed), {removed});
  out["sightings"] = give_pages<uint8_t>(std::move(found.sightings), {found.sightings_bytes});
  out["latest_step"] = found.latest_step;
  return out;
}

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> copy_of(const Column<T>& column) {
  return std::vector<T>(column.data(), column.data() + column.shape(0));
}

void restore(Table& table, const Column<uint64_t>& ids, const Column<uint32_t>& words,
             const Column<uint32_t>& stamps, const RowBytes& rows, const Column<uint64_t>& removed,
             const Column<uint8_t>& sightings, uint32_t latest_step, bool keep_present) {
  const size_t n = ids.shape(0);
  require(words.shape(0) == n && rows.shape(0) == n && (stamps.shape(0) == n || !stamps.shape(0)),
          "ids, words, stamps and rows must have one length");
  require(!n || rows.shape(1) == table.options().row_bytes(),
          "rows must have the table's bytes per row");
  Snapshot from;
  from.ids = copy_of(ids);
  from.words = copy_of(words);
  from.stamps = copy_of(stamps);
  from.rows.assign(rows.data(), rows.data() + rows.size());
  from.removed = copy_of(removed);
  from.sightings = copy_of(sightings);
  from.latest_step = latest_step;
  nb::gil_scoped_release free;
  table.restore(from, keep_present);
}

nb::dict lease(Table& table, const Column<uint64_t>& ids, size_t start, size_t stop) {
  require(start <= stop && stop <= ids.shape(0), "start and stop must lie inside ids");
  Snapshot found;
  {
    nb::gil_scoped_release free;
    found = table.lease(ids.data() + start, stop - start);
  }
  return give_snapshot(table, std::move(found));
}

}  // namespace

void bind_table(nb::module_& module) {
  nb::class_<Counters>(module, "Counters")
      .def_ro("created", &Counters::created)
      .def_ro("evicted", &Counters::evicted)
      .def_ro("expired", &Counters::expired)
      .def_ro("not_admitted", &Counters::not_admitted)
      .def_ro("gradients_not_admitted", &Counters::gradients_not_admitted)
      .def_ro("gradients_evicted", &Counters::gradients_evicted);

  nb::class_<Table>(module, "Table")
      .def(nb::init<const Options&>(), nb::arg("options"))
      .def("__len__", &Table::size)
      .def("read", &read_rows, nb::arg("ids"), nb::arg("start"), nb::arg("stop"), nb::arg("create"),
           nb::arg("step"), nb::arg("handles"), nb::arg("values"), nb::arg("writes"))
      .def("refresh", &refresh_rows, nb::arg("ids"), nb::arg("start"), nb::arg("stop"), nb::arg("step"),
           nb::arg("handles"), nb::arg("values"), nb::arg("writes"))
      .def("push", &push_rows, nb::arg("parts"), nb::arg("step"), nb::arg("lr"), nb::arg("staleness"))
      .def("rows", &all_rows)
      .def("freeze", &Table::freeze, nb::arg("only_changed"), nb::arg("track"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("copy_slice", &Table::copy_slice, nb::arg("slots"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("collect", &collect_snapshot)
      .def("settle", &Table::settle, nb::arg("kept"), nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &restore, nb::arg("ids"), nb::arg("words"), nb::arg("stamps"),
           nb::arg("rows"), nb::arg("removed"), nb::arg("sightings"), nb::arg("latest_step"),
           nb::arg("keep_present") = false)
      .def("lease", &lease, nb::arg("ids"), nb::arg("start"), nb::arg("stop"))
      .def_prop_ro("resident_bytes", &Table::resident_bytes)
      .def_prop_ro("counters", &Table::counters);
}

}  // namespace embedding
