# Turns text files into a C file with one zero-terminated array: cmake -DOUT=FILE -DSYMBOL=NAME -DFILES="a;b" -P this.
# A script of its own, so that a build makes the array anew when a text has changed.
set(bytes "")
foreach(file ${FILES})
    file(READ ${file} hex HEX)
    string(APPEND bytes "${hex}")
endforeach()
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
string(REGEX REPLACE "((........){24})" "\\1\n" bytes "${bytes}") # lines that an editor opens
file(WRITE ${OUT} "/* made from texts by cmake/embed_texts.cmake */\nextern const char ${SYMBOL}[];\nconst char ${SYMBOL}[] = {\n${bytes}0};\n")
