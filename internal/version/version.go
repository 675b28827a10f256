// Package version tells what build the programs are.
package version

import "runtime/debug"

// release is set by the linker when a package is built: -X
// heddle.dev/heddle/internal/version.release=VERSION.
var release string

// String is the package's version, or that of the module, or the first 12 digits of the commit it
// was built from.
func String() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return s.Value[:12]
		}
	}
	return info.Main.Version
}
