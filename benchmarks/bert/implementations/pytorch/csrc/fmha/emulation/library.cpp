/* What tests ask of an emulated library besides fmha.h; with it the rest of the library. */
#include "../library.cu"

/* What was found wrong since the last call, a line each. */
extern "C" const char *emulation_reports() {
    static std::string text;
    text.clear();
    for (const std::string &line : emulation::reports) text += line + "\n";
    emulation::reports.clear();
    return text.c_str();
}

/* Leaves out the barrier or wait at this line of a file; "" none. */
extern "C" void emulation_skip(const char *file, int line) {
    static std::string name;
    name = file;
    emulation::skipped = {name.c_str(), line};
}
