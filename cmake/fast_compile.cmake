# Torch's headers take most of a file's compile time: they are parsed once per
# target, and a few files of the library are compiled together. `make
# check-headers` goes without: every file still names what it needs.
function(precompile target)
  if(SHARDTENSOR_FAST_COMPILE)
    target_precompile_headers(${target} ${ARGN})
  endif()
endfunction()

# g++ collects its garbage once it has taken 1 GiB, a twentieth of the time less.
function(collect_later target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND SHARDTENSOR_FAST_COMPILE)
    target_compile_options(${target} PRIVATE --param=ggc-min-heapsize=1048576)
  endif()
endfunction()
collect_later(shardtensor)

precompile(shardtensor PRIVATE
  <ATen/core/Tensor.h>
  <ATen/core/dispatch/Dispatcher.h>
  <torch/csrc/autograd/function.h>
  <torch/library.h>)
# Some files of one folder at a time: of what a file costs, 2 s are templates of
# torch's headers, once each time.
function(compile_together target batch)
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${SHARDTENSOR_FAST_COMPILE} UNITY_BUILD_MODE GROUP)
  foreach(source ${ARGN})
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME folder)
    math(EXPR group "0${files_in_${folder}} / ${batch}")
    math(EXPR files_in_${folder} "0${files_in_${folder}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder}_${group})
  endforeach()
endfunction()
# A change compiles no longer than one file without precompiled headers does.
compile_together(shardtensor 12 ${core_sources})
# Other flags than the target's. Clang takes no precompiled headers then; g++ 12 does,
# and crashes where the level of optimization is another.
set(own_definitions shardtensor/distributed/gloo.cpp shardtensor/distributed/nccl.cpp)
set_source_files_properties(${own_definitions} ${loops} ${exact_loops} PROPERTIES
  SKIP_UNITY_BUILD_INCLUSION ON)
set_source_files_properties(${loops} ${exact_loops} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set_source_files_properties(${own_definitions} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()
