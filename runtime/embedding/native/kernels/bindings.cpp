// The Python face of the engine: arrays in, arrays filled, the interpreter lock released.
#include "bindings.hpp"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "machine.hpp"
#include "table.hpp"

namespace embedding {

namespace {

template <class Array>
std::vector<Part> parts_of(const std::vector<Table*>& tables, const Ids& ids, const Spans& spans,
                           const Int64s& handles, const Int64s& writes, const Array& numbers) {
  const auto n = static_cast<int64_t>(ids.shape(0)), all = static_cast<int64_t>(numbers.size());
  require(spans.shape(0) == tables.size(), "spans must be [tables, 3]");
  require(handles.shape(0) == ids.shape(0) && writes.shape(0) == ids.shape(0),
          "ids, handles and writes must have one length");
  std::vector<Part> parts;
  for (size_t t = 0; t < tables.size(); ++t) {
    const Options& options = tables[t]->options();
    const int64_t first = spans(t, 0), rows = spans(t, 1), at = spans(t, 2);
    require(numbers.dtype() == (options.wide ? nb::dtype<double>() : nb::dtype<float>()),
            "values and gradients must be of the tables' dtype");
    require(first >= 0 && rows >= 0 && first <= n && rows <= n - first,
            "the rows of a table must lie inside ids");
    require(at >= 0 && at <= all && rows <= (all - at) / static_cast<int64_t>(options.dim),
            "the rows of a table must lie inside values or gradients");
    char* const start = static_cast<char*>(const_cast<void*>(
        static_cast<const void*>(numbers.data())));  // a push only reads it
    parts.push_back({ids.data() + first, handles.data() + first, writes.data() + first,
                     start + at * options.number_bytes(), static_cast<size_t>(rows)});
  }
  return parts;
}

void read_rows(const std::vector<Table*>& tables, const Ids& ids, const Spans& spans,
               const Int64s& handles, const Int64s& writes, const Matrix& values, bool create,
               int64_t step) {
  const auto parts = parts_of(tables, ids, spans, handles, writes, values);
  nb::gil_scoped_release free;
  for (size_t t = 0; t < tables.size(); ++t) tables[t]->read(parts[t], create, step);
}

size_t refresh_rows(const std::vector<Table*>& tables, const Ids& ids, const Spans& spans,
                    const Int64s& handles, const Int64s& writes, const Matrix& values,
                    int64_t step) {
  const auto parts = parts_of(tables, ids, spans, handles, writes, values);
  nb::gil_scoped_release free;
  size_t replaced = 0;
  for (size_t t = 0; t < tables.size(); ++t) replaced += tables[t]->refresh(parts[t], step);
  return replaced;
}

using PythonPush = std::tuple<Ids, Spans, Int64s, Int64s, ConstMatrix>;

void push_rows(const std::vector<Table*>& tables, const std::vector<PythonPush>& pushes,
               int64_t step, const std::vector<double>& lrs, const Int64s& staleness) {
  require(staleness.shape(0) == 64, "staleness must have 64 places");
  require(lrs.size() == tables.size(), "each table has a learning rate");
  std::vector<std::vector<Part>> by_table(tables.size());
  for (const auto& [ids, spans, handles, writes, gradients] : pushes) {
    const auto parts = parts_of(tables, ids, spans, handles, writes, gradients);
    for (size_t t = 0; t < tables.size(); ++t) by_table[t].push_back(parts[t]);
  }
  nb::gil_scoped_release free;
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t]->push(by_table[t], step, lrs[t], staleness.data());
  }
}

template <class T>
nb::ndarray<nb::numpy, T> empty(size_t rows, size_t columns) {
  return give<T>(Column<T>(rows * columns), {rows, columns});
}

nb::object give_floats(std::vector<char>&& bytes, size_t rows, size_t columns, bool wide) {
  if (wide) return nb::cast(give<double>(std::move(bytes), {rows, columns}));
  return nb::cast(give<float>(std::move(bytes), {rows, columns}));
}

nb::tuple all_rows(const Table& table) {
  Rows rows = unlocked([&] { return table.rows(); });
  const size_t n = rows.ids.size();
  const bool wide = table.options().wide;
  return nb::make_tuple(give<uint64_t>(std::move(rows.ids), {n}),
                        give_floats(std::move(rows.values), n, table.options().dim, wide),
                        give_floats(std::move(rows.state), n, table.options().state_floats(), wide));
}

// A snapshot or an image of n rows, as `restore` takes it.
template <class Found>
nb::dict give_rows(const Table& table, Found found, size_t n, size_t stamps) {
  nb::dict out;
  out["ids"] = give<uint64_t>(std::move(found.ids), {n});
  out["words"] = give<uint32_t>(std::move(found.words), {n});
  out["stamps"] = give<uint32_t>(std::move(found.stamps), {stamps});
  out["rows"] = give<uint8_t>(std::move(found.rows), {n, table.options().row_bytes()});
  out["latest_step"] = found.latest_step;
  return out;
}

nb::dict collect_snapshot(Table& table) {
  Image found = unlocked([&] { return table.collect(); });
  const size_t n = found.n, stamps = found.stamps.data() ? n : 0;
  return give_rows(table, std::move(found), n, stamps);
}

using RowBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> copy_of(const Given<T>& column) {
  return std::vector<T>(column.data(), column.data() + column.shape(0));
}

void restore(Table& table, const Given<uint64_t>& ids, const Given<uint32_t>& words,
             const Given<uint32_t>& stamps, const RowBytes& rows, uint32_t latest_step,
             bool keep_present) {
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
  from.latest_step = latest_step;
  nb::gil_scoped_release free;
  table.restore(from, keep_present);
}

void forget(Table& table, const Given<uint64_t>& ids) {
  unlocked([&] { table.forget(ids.data(), ids.shape(0)); });
}

nb::dict lease(Table& table, const Given<uint64_t>& ids, size_t start, size_t stop) {
  require(start <= stop && stop <= ids.shape(0), "start and stop must lie inside ids");
  Snapshot found = unlocked([&] { return table.lease(ids.data() + start, stop - start); });
  const size_t n = found.ids.size(), stamps = found.stamps.size();
  return give_rows(table, std::move(found), n, stamps);
}

// The words of an enumeration of kernels.hpp, in its order.
template <class Enum>
void bind_words(nb::module_& module, const char* name, std::initializer_list<const char*> words) {
  nb::enum_<Enum> bound(module, name);
  int number = 0;
  for (const char* word : words) bound.value(word, static_cast<Enum>(number++));
}

void bind_options(nb::module_& module) {
  bind_words<OptimizerKind>(module, "OptimizerKind", {"sgd", "adagrad", "adagrad_row", "adam",
                                                      "adam_row", "ftrl"});
  bind_words<Initial>(module, "Initial", {"uniform", "normal", "constant"});
  bind_words<Eviction>(module, "Eviction", {"none", "lru"});

  nb::class_<Options>(module, "Options")
      .def(nb::init<>())
      .def_rw("dim", &Options::dim)
      .def_rw("wide", &Options::wide)
      .def_rw("optimizer", &Options::optimizer)
      .def_rw("initial_accumulator", &Options::initial_accumulator)
      .def_rw("eps", &Options::eps)
      .def_rw("l1", &Options::l1)
      .def_rw("l2", &Options::l2)
      .def_rw("key", &Options::key)
      .def_rw("initial", &Options::initial)
      .def_rw("initial_scale", &Options::initial_scale)
      .def_rw("eviction", &Options::eviction)
      .def_rw("capacity_rows", &Options::capacity_rows)
      .def_rw("admission_probability", &Options::admission_probability)
      .def_rw("expire_after_steps", &Options::expire_after_steps)
      .def_prop_ro("row_bytes", &Options::row_bytes);
}

void bind_table(nb::module_& module) {
  nb::class_<Counters>(module, "Counters")
      .def_ro("created", &Counters::created)
      .def_ro("evicted", &Counters::evicted)
      .def_ro("expired", &Counters::expired)
      .def_ro("not_admitted", &Counters::not_admitted)
      .def_ro("gradients_not_admitted", &Counters::gradients_not_admitted)
      .def_ro("gradients_evicted", &Counters::gradients_evicted);

  nb::class_<Table>(module, "Table")
      .def(nb::init<const Options&>(), "options"_a)
      .def("__len__", &Table::size)
      .def("rows", &all_rows)
      .def("freeze", &Table::freeze, nb::call_guard<nb::gil_scoped_release>())
      .def("copy_slice", &Table::copy_slice, "slots"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("collect", &collect_snapshot)
      .def("drop_snapshot", &Table::drop_snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &restore, "ids"_a, "words"_a, "stamps"_a, "rows"_a,
           "latest_step"_a, "keep_present"_a = false)
      .def("forget", &forget, "ids"_a)
      .def("lease", &lease, "ids"_a, "start"_a, "stop"_a)
      .def_prop_ro("state_floats", [](const Table& t) { return t.options().state_floats(); })
      .def_prop_ro("resident_bytes", &Table::resident_bytes)
      .def_prop_ro("counters", &Table::counters);

  module.def("read", &read_rows, "tables"_a, "ids"_a, "spans"_a, "handles"_a, "writes"_a,
             "values"_a, "create"_a, "step"_a);
  module.def("refresh", &refresh_rows, "tables"_a, "ids"_a, "spans"_a, "handles"_a, "writes"_a,
             "values"_a, "step"_a);
  module.def("push", &push_rows, "tables"_a, "pushes"_a, "step"_a, "lrs"_a, "staleness"_a);
}

// Of any bytes; long ones without the interpreter lock, for short ones it would only be waited for.
uint32_t checksum(nb::handle given, uint32_t before) {
  constexpr Py_ssize_t kLong = Py_ssize_t{64} << 10;
  Py_buffer view;
  if (PyObject_GetBuffer(given.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto bytes = static_cast<size_t>(view.len);
  const uint32_t sum = view.len < kLong ? crc32c(view.buf, bytes, before)
                                        : unlocked([&] { return crc32c(view.buf, bytes, before); });
  PyBuffer_Release(&view);
  return sum;
}

void bind_machine(nb::module_& module) {
  module.def("crc32c", &checksum, "data"_a, "before"_a = 0);
  module.def("flush_denormals", &flush_denormals, "on"_a);
  module.def("flushes_denormals", &flushes_denormals);
  module.def("empty_float32", &empty<float>, "rows"_a, "columns"_a);
  module.def("empty_float64", &empty<double>, "rows"_a, "columns"_a);
  module.def("empty_int64", &empty<int64_t>, "rows"_a, "columns"_a);
  module.def("idle_buffer_bytes", &idle_buffer_bytes);
  module.def("set_threads", &set_threads, "count"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def("threads", &threads);
  module.def("set_memory_limit", &set_memory_limit, "bytes"_a);
  module.def("memory_limit", &memory_limit);
  module.def("prefetch_level", &prefetch_level, nb::call_guard<nb::gil_scoped_release>());
  module.def("prefetch_probe_ns", &prefetch_probe);
  module.def("kernel_set", [] { return std::string(kernels().name); });
  module.def("choose_kernel_set", [](const std::string& name) {
    if (!choose_kernels(name.c_str())) {
      throw std::invalid_argument("kernel set " + name +
                                  " is not known or not supported by this processor");
    }
  });
}

}  // namespace

}  // namespace embedding

NB_MODULE(_kernels, module) {
  module.doc() = "Kernels of the embedding layer; see runtime.embedding.native.store.";
  nb::set_leak_warnings(false);  // types live until the process ends; a warning helps nobody
  embedding::bind_options(module);
  embedding::bind_table(module);
  embedding::bind_plan(module);
  embedding::bind_pooling(module);
  embedding::bind_machine(module);
}
