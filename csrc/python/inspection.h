// inspection: statistics, the timeline, addresses and fingerprints, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace memsaver::python {

// Adds the functions of memsaver_inspection.h to the module.
void define_inspection(pybind11::module_& m);

}  // namespace memsaver::python
