# One INTERFACE library that every target links, so that no target can forget a warning.
add_library(flags INTERFACE)
target_compile_definitions(flags INTERFACE _GNU_SOURCE HCATTN_VERSION="${PROJECT_VERSION}")
target_include_directories(flags INTERFACE ${PROJECT_SOURCE_DIR})
# -ffp-contract=off: results must not depend on what a compiler chose to fuse;
# kernels ask for fused multiply-add by intrinsic or fmaf().
target_compile_options(flags INTERFACE
    $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Werror
    -ffp-contract=off -fno-math-errno -g>)
if(HCATTN_SANITIZE)
    target_compile_options(flags INTERFACE -fsanitize=${HCATTN_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
    target_link_options(flags INTERFACE -fsanitize=${HCATTN_SANITIZE})
    target_compile_definitions(flags INTERFACE HCATTN_SANITIZED=1)
endif()
