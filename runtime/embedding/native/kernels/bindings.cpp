// The Python face of the engine: arrays in, arrays filled, the interpreter lock released.
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "bind_arrays.hpp"
#include "buffers.hpp"
#include "kernels.hpp"
#include "pages.hpp"
#include "probe.hpp"
#include "threads.hpp"

using namespace embedding;

NB_MODULE(_kernels, module) {
  module.doc() = "Kernels of the embedding engine; see runtime.embedding.native.store.";
  nb::set_leak_warnings(false);  // types live until the process ends; a warning helps nobody

  bind_options(module);
  bind_table(module);
  bind_plan(module);
  bind_pooling(module);
  module.def("empty_float32", &empty<float>, nb::arg("rows"), nb::arg("columns"));
  module.def("empty_float64", &empty<double>, nb::arg("rows"), nb::arg("columns"));
  module.def("empty_int64", &empty<int64_t>, nb::arg("rows"), nb::arg("columns"));
  module.def("idle_buffer_bytes", &idle_buffer_bytes);
  module.def("set_threads", &set_threads, nb::arg("count"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("threads", &threads);
  module.def("set_memory_limit", &set_memory_limit, nb::arg("bytes"));
  module.def("memory_limit", &memory_limit);
  module.def("prefetch_level", &prefetch_level, nb::call_guard<nb::gil_scoped_release>());
  module.def("choose_prefetch", &choose_prefetch, nb::arg("level"));
  module.def("prefetch_probe_ns", [] {
    const Probe found = prefetch_probe();
    return nb::make_tuple(found.first_ns, found.second_ns);
  });
  module.def("kernel_set", [] { return std::string(kernels().name); });
  module.def("choose_kernel_set", [](const std::string& name) {
    if (!choose_kernels(name.c_str())) {
      throw std::invalid_argument("kernel set " + name +
                                  " is not known or not supported by this processor");
    }
  });
}
