package tcp

import "testing"

// TestSeldomAlike: what is left has no divisor in common with what the kernel chooses from, and
// little more is kept than asked for.
func TestSeldomAlike(t *testing.T) {
	for _, n := range []int{28232, 28233, 64512, 128, 1000, 16} {
		kept := seldomAlike(n, n/8)
		for d := 2; d <= n; d++ {
			if (n-kept)%d == 0 && (n&^1)%d == 0 {
				t.Errorf("of %d ports %d are kept: what is left and all can be divided by %d", n, kept, d)
			}
		}
		if kept > n/8+16 {
			t.Errorf("of %d ports %d are kept, not about an eighth", n, kept)
		}
	}
}
