package model

import "testing"

func TestParseProtections(t *testing.T) {
	all := ""
	for i, p := range Protections {
		if p.Name == "" || p.Help == "" || p.Protection.String() != p.Name {
			t.Errorf("protection %d: %+v", i, p)
		}
		set, err := ParseProtections(p.Name)
		if err != nil || set != 1<<p.Protection {
			t.Errorf("%s: %#x, %v", p.Name, set, err)
		}
		all += "," + p.Name
	}
	if set, err := ParseProtections(all[1:]); err != nil || set != 1<<len(Protections)-1 {
		t.Errorf("%s: %#x, %v", all[1:], set, err)
	}
	if set, err := ParseProtections(""); err != nil || set != 0 {
		t.Errorf("nothing: %#x, %v", set, err)
	}
	for _, bad := range []string{"nonsense", ",", "bind,", "Bind", " bind"} {
		if set, err := ParseProtections(bad); err == nil {
			t.Errorf("%q: %#x, want an error", bad, set)
		}
	}
}
