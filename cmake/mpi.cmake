# MPI is a library of its own that DistributedManager loads when it is wanted:
# programs must start on machines without MPI.
cmake_path(GET Python_EXECUTABLE PARENT_PATH python_programs)
find_program(MPI_CXX_COMPILER NAMES mpicxx mpic++ HINTS ${python_programs})
# Looked for again until it is there. FindMPI would take SLURM's srun and keep it.
find_program(SHARDTENSOR_MPIRUN NAMES mpirun mpiexec HINTS ${python_programs})
if(SHARDTENSOR_MPIRUN)
  set(MPIEXEC_EXECUTABLE ${SHARDTENSOR_MPIRUN})
endif()
find_package(MPI COMPONENTS CXX)
if(MPI_CXX_FOUND)
  file(GLOB mpi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/shardtensor/mpi/*.cpp)
  add_library(shardtensor_mpi MODULE ${mpi_sources})
  target_compile_definitions(shardtensor_mpi PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_compile_options(shardtensor_mpi PRIVATE -Wall -Wextra)
  target_link_libraries(shardtensor_mpi PRIVATE shardtensor MPI::MPI_CXX)
  set_target_properties(shardtensor_mpi PROPERTIES
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    UNITY_BUILD ${SHARDTENSOR_FAST_COMPILE} UNITY_BUILD_BATCH_SIZE 0
    LIBRARY_OUTPUT_DIRECTORY $<TARGET_FILE_DIR:shardtensor>)
else()
  message(NOTICE "No MPI: libshardtensor_mpi.so is left out")
endif()
