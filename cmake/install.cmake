# `cmake --install` and the wheel: headers, libraries and the package that
# find_package(shardtensor) reads. In the wheel the prefix is the Python package.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

if(SKBUILD)
  set(install_prefix shardtensor/)
  set(library_dir shardtensor)
  set_target_properties(shardtensor PROPERTIES
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib")
else()
  set(install_prefix "")
  set(library_dir ${CMAKE_INSTALL_LIBDIR})
  set_target_properties(shardtensor PROPERTIES
    INSTALL_RPATH "$ORIGIN;${TORCH_INSTALL_PREFIX}/lib")
endif()
set(package_dir ${install_prefix}share/cmake/shardtensor)

install(TARGETS shardtensor EXPORT shardtensorTargets
  LIBRARY DESTINATION ${library_dir}
  FILE_SET HEADERS DESTINATION ${install_prefix}include
  FILE_SET generated DESTINATION ${install_prefix}include)
if(TARGET shardtensor_mpi)
  # In a virtual environment libmpi.so stands beside the Python folder.
  set_target_properties(shardtensor_mpi PROPERTIES
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../../.." INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS shardtensor_mpi LIBRARY DESTINATION ${library_dir})
endif()
install(EXPORT shardtensorTargets NAMESPACE shardtensor:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/shardtensorConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/shardtensorConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_CHECK_REQUIRED_COMPONENTS_MACRO NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/shardtensorConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/find_torch.cmake
  ${PROJECT_BINARY_DIR}/package/shardtensorConfig.cmake
  ${PROJECT_BINARY_DIR}/package/shardtensorConfigVersion.cmake DESTINATION ${package_dir})
