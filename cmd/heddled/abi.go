package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// maxLayout bounds what is read of another version's layout.
const maxLayout = 1 << 20

// newABICommand tells package scripts whether an upgrade can go on before any file is replaced.
func newABICommand() *cobra.Command {
	var dir, check string
	cmd := &cobra.Command{
		Use: "abi", Short: "Print the layout of the maps this version pins, or judge another version's",
		Long: `Prints the layout of the maps that this version pins. With --check, judges another version's layout instead:
exit code 1 says that an agent of that version would refuse what is pinned on this node.`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if check == "" {
				layout, err := datapath.Layout()
				fmt.Fprint(cmd.OutOrStdout(), layout)
				return err
			}
			in := cmd.InOrStdin()
			if check != "-" {
				f, err := os.Open(check)
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			raw, err := io.ReadAll(io.LimitReader(in, maxLayout))
			if err != nil {
				return fmt.Errorf("read layout: %w", err)
			}
			return datapath.CheckLayout(dir, string(raw))
		},
	}
	cmd.Flags().StringVar(&check, "check", "", "file with another version's layout, or - for standard input")
	cmd.Flags().StringVar(&dir, "bpf-dir", "/sys/fs/bpf/heddle", "directory of the pins")
	return cmd
}
