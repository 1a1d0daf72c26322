# Torch's headers take most of a file's compile time: they are parsed once per
# target, and a few files of the library are compiled together. `make
# check-headers` goes without: every file still names what it needs.
function(precompile target)
  if(SHARDTENSOR_FAST_COMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# g++ collects its garbage once it has taken 1 GiB, a twentieth of the time less.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND SHARDTENSOR_FAST_COMPILE)
  target_compile_options(shardtensor PRIVATE --param=ggc-min-heapsize=1048576)
endif()

precompile(shardtensor
  <ATen/core/Tensor.h>
  <ATen/core/dispatch/Dispatcher.h>
  <torch/csrc/autograd/function.h>
  <torch/library.h>)
# Six files of one folder at a time: a change compiles in little more than one
# file without precompiled headers does.
set_target_properties(shardtensor PROPERTIES
  UNITY_BUILD ${SHARDTENSOR_FAST_COMPILE} UNITY_BUILD_MODE GROUP)
foreach(source ${core_sources})
  cmake_path(GET source PARENT_PATH folder)
  cmake_path(GET folder FILENAME folder)
  math(EXPR batch "0${files_in_${folder}} / 6")
  math(EXPR files_in_${folder} "0${files_in_${folder}} + 1")
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder}_${batch})
endforeach()
# Other flags than the target's.
set_source_files_properties(
  shardtensor/distributed/gloo.cpp
  shardtensor/distributed/nccl.cpp
  shardtensor/points/search.cpp
  shardtensor/rules/attention/neighborhood_kernel.cpp
  shardtensor/rules/norm/cells.cpp
  shardtensor/rules/ops/counter_loops.cpp
  PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
