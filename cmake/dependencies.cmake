# Everything from Debian, by pkg-config; scripts/install-dependencies names the packages.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(ZMQ REQUIRED IMPORTED_TARGET libzmq>=4.3)
pkg_check_modules(PROTOBUF_C REQUIRED IMPORTED_TARGET libprotobuf-c>=1.4)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
find_program(PROTOC_C NAMES protoc-c protoc-gen-c REQUIRED)

# Only the serial OpenBLAS: a parallel one starts threads of its own, beside our one pool.
if(NOT HCATTN_OPENBLAS_CHECKED)
    try_run(openblas_parallel openblas_compiled ${CMAKE_BINARY_DIR}/check-openblas
            ${PROJECT_SOURCE_DIR}/cmake/check_openblas.c
            LINK_LIBRARIES PkgConfig::OPENBLAS COMPILE_OUTPUT_VARIABLE openblas_output)
    if(NOT openblas_compiled)
        message(FATAL_ERROR "OpenBLAS could not be linked:\n${openblas_output}")
    elseif(NOT openblas_parallel EQUAL 0)
        message(FATAL_ERROR "This OpenBLAS starts threads of its own: install libopenblas-serial-dev and "
                            "choose it (update-alternatives --config libopenblas.so-x86_64-linux-gnu)")
    endif()
    set(HCATTN_OPENBLAS_CHECKED ON CACHE INTERNAL "the serial OpenBLAS is there")
endif()
