# find_torch(QUIET|REQUIRED [<folder>...]): find_package(Torch), in the folders at last.
#
# Where libtorch has CUDA, torch's package looks for a whole toolkit with nvcc. We
# compile nothing for a GPU and link libtorch alone, so the headers suffice. Wheels of
# PyPI stand beside those that bring them (cuda_wheels), of torch's own version of CUDA.
# Torch's targets name none of the toolkit but torch::cudart; where there is one, torch
# looks for no more. A program that compiles for GPUs calls find_package(Torch) first.
macro(find_torch necessity)
  find_path(torch_package TorchConfig.cmake NO_CACHE
    HINTS "${Torch_DIR}" ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH PATHS ${ARGN}
    PATH_SUFFIXES Torch share/cmake/Torch)
  cmake_path(SET nvidia NORMALIZE "${torch_package}/../../../../nvidia")
  file(GLOB cuda_wheels ${nvidia}/*/include)
  find_path(cuda_runtime cuda_runtime_api.h NO_CACHE NO_DEFAULT_PATH PATHS ${cuda_wheels})
  if(EXISTS ${torch_package}/../../../lib/libtorch_cuda.so AND NOT TARGET torch::cudart)
    if(cuda_runtime)
      add_library(torch::cudart INTERFACE IMPORTED)
      target_include_directories(torch::cudart INTERFACE ${cuda_wheels})
    elseif(NOT DEFINED ENV{CUDA_PATH})
      # Torch looks beside the nvcc on the path, which may be a script that calls another
      # one; CMake asks nvcc itself.
      find_package(CUDAToolkit QUIET)
      set(ENV{CUDA_PATH} "${CUDAToolkit_LIBRARY_ROOT}")
    endif()
  endif()
  set(torch_message_level "${CMAKE_MESSAGE_LOG_LEVEL}")
  set(CMAKE_MESSAGE_LOG_LEVEL ERROR) # torch warns of a profiler that nobody links here
  find_package(Torch ${necessity} HINTS "${torch_package}")
  set(CMAKE_MESSAGE_LOG_LEVEL "${torch_message_level}")
endmacro()
