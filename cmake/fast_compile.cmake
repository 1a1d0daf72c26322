# Torch's headers take most of a file's compile time: they are parsed once per
# target, and a few files of the library are compiled together. asan goes
# without, so that every file still names what it needs.
function(precompile target)
  if(SHARDTENSOR_FAST_COMPILE)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

precompile(shardtensor
  <ATen/core/Tensor.h>
  <ATen/core/dispatch/Dispatcher.h>
  <torch/csrc/autograd/function.h>
  <torch/library.h>)
set_target_properties(shardtensor PROPERTIES
  UNITY_BUILD ${SHARDTENSOR_FAST_COMPILE} UNITY_BUILD_BATCH_SIZE 4)
# Other flags than the target's.
set_source_files_properties(
  shardtensor/distributed/gloo.cpp
  shardtensor/distributed/nccl.cpp
  shardtensor/rules/norm/cells.cpp
  PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
