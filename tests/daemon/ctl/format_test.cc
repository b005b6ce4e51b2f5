// SPDX-License-Identifier: Apache-2.0
#include "daemon/ctl/format.h"

#include <limits>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

TEST(FormatTest, CountsHaveACommaEveryThreeDigits) {
  EXPECT_EQ(Count(0), "0");
  EXPECT_EQ(Count(999), "999");
  EXPECT_EQ(Count(1000), "1,000");
  EXPECT_EQ(Count(1234567), "1,234,567");
  EXPECT_EQ(Count(std::numeric_limits<uint64_t>::max()), "18,446,744,073,709,551,615");
}

TEST(FormatTest, BytesTakeTheLargestUnitThatFits) {
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1024), "1.0 KiB");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
  EXPECT_EQ(Bytes((uint64_t{1} << 20) - 1), "1.0 MiB") << "not 1024.0 KiB";
  EXPECT_EQ(Bytes(uint64_t{4} << 30), "4.0 GiB");
  EXPECT_EQ(Bytes(uint64_t{5000} << 40), "5000.0 TiB");
}

TEST(FormatTest, TimesHaveTwoUnits) {
  EXPECT_EQ(Seconds(0), "0 ms");
  EXPECT_EQ(Seconds(0.85), "850 ms");
  EXPECT_EQ(Seconds(42.9), "42 s");
  EXPECT_EQ(Seconds(192), "3 m 12 s");
  EXPECT_EQ(Seconds(18240), "5 h 4 m");
  EXPECT_EQ(Seconds(183600), "2 d 3 h");
}

TEST(FormatTest, SharesOfNothingAreADash) {
  EXPECT_EQ(Percent(1, 3), "33.3 %");
  EXPECT_EQ(Percent(3, 3), "100.0 %");
  EXPECT_EQ(Percent(0, 0), "-");
  EXPECT_EQ(Ratio(64, 10), "6.4x");
  EXPECT_EQ(Ratio(64, 0), "-");
}

TEST(FormatTest, RatesHaveADigitBehindThePointWhileTheyAreSmall) {
  EXPECT_EQ(Rate(0), "0.0");
  EXPECT_EQ(Rate(12.34), "12.3");
  EXPECT_EQ(Rate(1234.5), "1,235");
}

TEST(FormatTest, HexIsCutWhereAskedFor) {
  EXPECT_EQ(Hex(std::string("\x00\xff\x10", 3)), "00ff10");
  EXPECT_EQ(Hex(std::string("\x00\xff\x10", 3), 2), "00ff");
  EXPECT_EQ(Hex(""), "");
}

TEST(FormatTest, PrintableTextHasNothingThatATerminalObeys) {
  EXPECT_EQ(Printable("engine-7 \"a\\b\" Größe"), "engine-7 \"a\\b\" Größe");
  EXPECT_EQ(Printable("a\x1b[2Jb\nc\td\x7f"), "a\\x1b[2Jb\\x0ac\\x09d\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "\\x9b31m")
      << "CSI as one character";
  EXPECT_EQ(Printable("\xc2\xa0\xc2"), "\xc2\xa0\xc2");
}

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table({{"NAME", Table::Align::kLeft}, {"N"}, {"LAST", Table::Align::kLeft}});
  table.AddRow({"a", "1,000", "x"});
  table.AddRow({"Größe", "2", ""});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(),
            "NAME       N  LAST\n"
            "a      1,000  x\n"
            "Größe      2\n");
}

TEST(TableTest, AClientsNameCannotForgeALine) {
  Table table({{"NAME", Table::Align::kLeft}});
  table.AddRow({"engine\nforged"});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(), "NAME\nengine\\x0aforged\n");
}

TEST(TableTest, WithoutRowsThereIsNothing) {
  std::ostringstream out;
  Table({{"NAME"}}).Print(out);
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace crumb
