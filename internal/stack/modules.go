package stack

import (
	"fmt"
	"slices"
)

// lacking are the settings of profiles that modules do not have, and controls their congestion
// controls. Of the operator's own modules it is known what the protocol has no word for.
var (
	lacking = map[Kind][]Setting{
		Smoltcp:      {InitialWindow, PacingRate, NotsentLowat, ECN, MSS},
		Netstack:     {InitialWindow, PacingRate, NotsentLowat, ECN, MSS, DelayedACK},
		modulePrefix: {InitialWindow, PacingRate, NotsentLowat, ECN, MSS},
	}
	controls = map[Kind][]string{Smoltcp: {"none", "reno", "cubic"}, Netstack: {"reno", "cubic"}, modulePrefix: {"none", "reno", "cubic", "bbr"}}
)

// Check reports what of settings a stack has nowhere, whatever a node is like: a
// *policy.FieldError. Profiles that are stored may have it, of builds that did not ask: they have
// their fallback.
func (k Kind) Check(s Settings) error {
	of := k
	if _, own := k.Module(); own {
		of = modulePrefix
	}
	for _, set := range s.Text() {
		if slices.Contains(lacking[of], set.Name) {
			return fault("settings."+string(set.Name), "leave it out, or take stack: kernel", "%s has no such setting", k)
		}
	}
	if has, ok := controls[of]; ok && s.Congestion != "" && !slices.Contains(has, s.Congestion) {
		return fault("settings.congestion", fmt.Sprintf("write one of %q, or take stack: kernel", has), "%s has none of that name: %s", k, s.Congestion)
	}
	return nil
}
