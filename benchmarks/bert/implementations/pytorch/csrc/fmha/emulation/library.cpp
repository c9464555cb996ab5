/* The emulated library: fmha.h and the functions that only tests call. */
#include "../library.cu"

/* Return the errors found since the last call, one per line. */
extern "C" const char *emulation_reports() {
    static std::string text;
    text.clear();
    for (const std::string &line : emulation::reports) text += line + "\n";
    emulation::reports.clear();
    return text.c_str();
}

/* Skip the barrier or wait at this line of a file; "" skips none. */
extern "C" void emulation_skip(const char *file, int line) {
    static std::string name;
    name = file;
    emulation::skipped = {name.c_str(), line};
}
