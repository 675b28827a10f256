// Command sbom writes what a package is made of, as a software bill of materials in CycloneDX's
// JSON (https://cyclonedx.org/docs/1.6/json/), to standard output:
//
//	sbom NAME VERSION PROGRAM... <CRATES
//
// The Go modules are those that each PROGRAM, a file, says it was built from. CRATES are lines of
// `cargo tree --prefix none --format '{p}|{l}'`. The same input gives the same bytes: the document
// has no time and no serial number.
package main

import (
	"bufio"
	"cmp"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// uPlot is the version of internal/ui/assets/vendor/uplot.js, which is its dist/uPlot.esm.js.
const uPlot = "1.6.32"

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "sbom: want NAME VERSION PROGRAM..., and the list of crates as standard input")
		os.Exit(2)
	}
	if err := write(os.Stdout, os.Args[1], os.Args[2], os.Args[3:], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func write(out io.Writer, name, version string, programs []string, crates io.Reader) error {
	parts := map[string]cdx.Component{}
	for _, file := range programs {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read what %s is built from: %w", file, err)
		}
		add(parts, "golang", "std", strings.TrimPrefix(info.GoVersion, "go"), "BSD-3-Clause")
		for _, module := range info.Deps {
			module = used(module)
			add(parts, "golang", module.Path, module.Version, "")
		}
	}
	if err := addCrates(parts, crates); err != nil {
		return fmt.Errorf("read the list of crates: %w", err)
	}
	add(parts, "npm", "uplot", uPlot, "MIT")

	bom := cdx.NewBOM()
	bom.SerialNumber = ""
	bom.Metadata = &cdx.Metadata{Component: &cdx.Component{Type: cdx.ComponentTypeApplication, Name: name, Version: version}}
	all := make([]cdx.Component, 0, len(parts))
	for _, part := range parts {
		all = append(all, part)
	}
	slices.SortFunc(all, func(a, b cdx.Component) int { return cmp.Compare(a.PackageURL, b.PackageURL) })
	bom.Components = &all
	return cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// used is the module that is in the program, which may stand in for the one that was asked for.
func used(module *debug.Module) *debug.Module {
	if module.Replace != nil {
		return module.Replace
	}
	return module
}

// addCrates adds those of a list that are not of the repository.
func addCrates(parts map[string]cdx.Component, list io.Reader) error {
	lines := bufio.NewScanner(list)
	crates := 0
	for lines.Scan() {
		if lines.Text() == "" { // between the trees of two packages
			continue
		}
		crates++
		crate, license, found := strings.Cut(lines.Text(), "|")
		words := strings.Fields(crate) // NAME vVERSION, and in parentheses where it is or what for
		if !found || len(words) < 2 || !strings.HasPrefix(words[1], "v") {
			return fmt.Errorf("%q: want NAME vVERSION|LICENSE", lines.Text())
		}
		if strings.Contains(crate, "(/") {
			continue
		}
		add(parts, "cargo", words[0], words[1][1:], license)
	}
	if crates == 0 {
		return errors.Join(errors.New("it is empty"), lines.Err())
	}
	return lines.Err()
}

// add adds a part by its package URL (https://github.com/package-url/purl-spec).
func add(parts map[string]cdx.Component, kind, name, version, license string) {
	c := cdx.Component{Type: cdx.ComponentTypeLibrary, Name: name, Version: version, PackageURL: "pkg:" + kind + "/" + name + "@" + version}
	c.BOMRef = c.PackageURL
	if license != "" {
		c.Licenses = &cdx.Licenses{{Expression: license}}
	}
	parts[c.PackageURL] = c
}
